//! README.md of an export: how a stranger runs and judges what is in the folder.

use std::fmt::Write as _;

use super::manifest::Manifest;
use super::writers::{ExportTarget, HLSL_GRID_REGISTER};

/// The whole page.
pub(super) fn text(manifest: &Manifest) -> String {
    let shape = manifest.shape;
    let mut text = format!(
        "# Kernels for packed, paged KV caches, as {}\n\n\
         Written by {} (`kvpack shaders export --to {}`). One file a kernel; `manifest.json` says for each what it binds,\n\
         how its uniform is packed, how many workgroups it takes and what it needs of a device. Nothing else is needed.\n\n\
         Shape: {} KV heads, {} query heads, {} channels of a key and {} of a value, pages of {} tokens.\n\n",
        manifest.code.language,
        manifest.generator,
        manifest.target,
        shape.kv_heads,
        shape.q_heads,
        shape.k_head_dim,
        shape.v_head_dim,
        shape.page_tokens,
    );
    text += "| file | what it does | workgroups | needs |\n|---|---|---|---|\n";
    for module in &manifest.modules {
        let counts = match module.dispatch.counts {
            super::manifest::CountsEntry::Workgroups => module.dispatch.formula.clone(),
            super::manifest::CountsEntry::Invocations => {
                format!("ceil({} / {})", module.dispatch.formula, module.workgroup_size[0])
            }
        };
        let z = match module.dispatch.z {
            1 => String::new(),
            z => format!(", z = {z}"),
        };
        let needs = match (module.portable, module.features.is_empty()) {
            (true, _) => "portable".to_owned(),
            (false, true) => "more than the default limits".to_owned(),
            (false, false) => module.features.join(", "),
        };
        let _ = writeln!(
            text,
            "| `{}` | {} | {counts}{z} | {needs} |",
            module.file, module.what
        );
    }
    text += "\n*Portable* is what runs within WebGPU's default limits (8 storage buffers, 16,384 bytes of workgroup memory,\n\
             256 invocations) and without features.\n\n## The files\n\n";
    text += &target_notes(manifest.target);
    let _ = write!(
        text,
        "\nChecks of indices: {}. Workgroup memory: {}.\n\n",
        manifest.code.bounds_checks, manifest.code.workgroup_memory
    );
    text += USE;
    text += if manifest.vectors.is_empty() {
        NO_VECTORS
    } else {
        VECTORS
    };
    text
}

fn target_notes(target: ExportTarget) -> String {
    match target {
        ExportTarget::Wgsl => {
            "WGSL as naga and wgpu take it: the line `enable subgroups;`, which naga refuses and browsers demand, is left\n\
             out. Group 0 only; binding numbers as in the manifest.\n"
                .to_owned()
        }
        ExportTarget::WgslBrowser => {
            "The standard's WGSL, for browsers and Dawn. Group 0 only; binding numbers as in the manifest. With the layout\n\
             `auto` leave out bindings whose `used` is false.\n"
                .to_owned()
        }
        ExportTarget::Spirv => {
            "SPIR-V 1.3 for Vulkan 1.1: compute shaders, descriptor set 0, the manifest's numbers as bindings; a uniform\n\
             buffer at 0, storage buffers elsewhere. Words are little-endian. Modules that need shader-f16 declare Float16, and\n\
             those that need subgroups the GroupNonUniform capabilities.\n"
                .to_owned()
        }
        ExportTarget::Msl => {
            "Metal Shading Language 2.4: one `kernel` function; buffers at the slots that `slot` names, `buffer(n)`. Give the\n\
             workgroup size of the manifest as threads per threadgroup. `entry_point` is the function's name.\n"
                .to_owned()
        }
        ExportTarget::Hlsl => format!(
            "HLSL for DXC: `dxc -T cs_6_0 -E ENTRY_POINT` (`cs_6_2 -enable-16bit-types` with shader-f16). Registers stand in\n\
             `slot`, space 0: the uniform in b0, read buffers in t, written ones in u, both raw (ByteAddressBuffer). HLSL has\n\
             no built-in count of workgroups, so put the three of each dispatch, x, y and z, as u32 into register b{HLSL_GRID_REGISTER}.\n"
        ),
        ExportTarget::Glsl => {
            "GLSL 4.50, a compute shader each, entry point `main`; `slot` names the `binding` of each buffer. Uniforms are\n\
             std140, storage is std430.\n"
                .to_owned()
        }
    }
}

const USE: &str = "\
## Running a kernel

1. Make a buffer for each binding. `shape` names its dimensions, slowest first; `type` says what a kernel reads, and all are
   multiples of 32-bit words. A uniform buffer should be a multiple of 16 bytes long.
2. Pack `params` by `offset`: each field takes 4 bytes, little-endian.
3. Count workgroups: evaluate `dispatch.formula` with the values of the params. Where `counts` is `invocations`, divide by
   `workgroup_size[0]` and round up. Call it n; then y = ceil(n / 65535), x = ceil(n / y), and z as given. Kernels read x
   and drop what lies beyond the end; where invocations are counted, x y `workgroup_size[0]` must not exceed 2^32.
4. Dispatch. A later dispatch sees what an earlier one wrote.

```python
import json, struct

manifest = json.load(open('manifest.json'))
module = manifest['modules'][0]

def pack(values):
    out = bytearray(-(-module['params']['size'] // 16) * 16)
    for field in module['params']['fields']:
        code = '<f' if field['type'] == 'f32' else '<I'
        struct.pack_into(code, out, field['offset'], values[field['name']])
    return bytes(out)
```

Pages: word w of slot t lies at w x page_tokens + t, w = head x head_words + channel / (32 / bits); codes fill words from the
lowest bits. `pages` has the numbers of each side. Scales begin at word `scale_offset` and fill words from the lowest bits
too; `scale_bits` of 16 are binary16, of 8 E4M3, of 32 f32. With c = head x head_dim + channel and H heads of d channels, the
scale of slot t is element

| `scale_layout` | element |
|---|---|
| `per_token` | head x page_tokens + t |
| `per_block` (16 channels) | (c / 16, rounded down) x page_tokens + t |
| `per_channel` | (t / token_group, rounded down) x H d + c |
| `per_tensor`, `none` | none in the page: `tensor_scales` holds one for each layer and side, or numbers are stored as they are |

Integers are two's complement. `fp4_e2m1`: codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6, and bit 3 is the sign. `fp8_e4m3`: a sign,
4 bits of exponent with bias 7, 3 of mantissa, no infinities, 0x7f is NaN. A number is code x scale, one f32 multiply.
`k_turns`, in the params of attention, is 0 here: only keys that are stored before RoPE need it.

| work list | entry, in u32 |
|---|---|
| `runs` | page, first slot, slots, source: 1 to 4 slots that cross no multiple of 4, and the row of the first; for `quantize_group` a whole group, of which the last so many slots are packed, and the page in which they wait |
| `items` | as the struct `Item` of the manifest: a range of neighbouring pages, the query tokens that see it, where its partials go |
| `page_table` | K page, V page, first live slot, end of live slots |
| `merges` | first partial, stride from one to the next, partials, output row; one entry a query token |

Pictures of pages, every rule of rounding, and an example with numbers are in kvpack's repository, `shaders/README.md`.

";

const NO_VECTORS: &str = "\
There are no golden vectors here; `kvpack shaders export --vectors` adds them.
";

const VECTORS: &str = "\
## Golden vectors

Each folder in `vectors/` is a case: `case.json` lists buffers, steps and what is expected. To run one by hand:

1. Make every buffer of `buffers`: from its `file` (.npy, little-endian; the data begin at byte `data_offset`), or with
   every 32-bit word set to `fill`.
2. Run the `steps` in order: each names its module, the numbers of workgroups, the values of the params, and which buffer
   goes to which binding.
3. Compare as `expect` says. `bits`: words equal, where the mask's bits are 1 if there is a mask. `bound`: |got - expected|
   <= bound, number by number, and NaN fails; where expected is an infinity got must be the same.

```python
import json, numpy as np

folder = manifest['vectors'][0]['folder']
case = json.load(open(f'{folder}/case.json'))
load = lambda name: np.load(f'{folder}/{name}')
types = {buffer['name']: {'u32': '<u4', 'f32': '<f4', 'f16': '<f2'}[buffer['type']] for buffer in case['buffers']}

def judge(expect, got):                      # got: the buffer's content, an array of 32-bit words
    want = load(expect['file'])
    if expect['rule'] == 'bits':
        mask = load(expect['mask']) if 'mask' in expect else np.uint32(0xffffffff)
        return bool(((got.view('<u4').reshape(want.shape) ^ want) & mask == 0).all())
    got = got.view(types[expect['buffer']]).reshape(want.shape).astype('<f8')
    with np.errstate(invalid='ignore'):
        near = np.abs(got - want) <= load(expect['bound'])
    return bool((near | (np.isinf(want) & (got == want))).all())
```

A program with a page layout of its own starts from `k`, `v` and `q`. `sequences` says whose rows they are: `tokens` rows of `k` and
`v` from `first_row` on, and the queries of its last `queries` tokens from `first_query` on; a query sees its own token and
those before it. Token t of K is packed in page `k_pages[t / page_tokens]` if t < `k_packed`, and else waits in f16, in page
`k_waiting[t / page_tokens]`; V likewise. `geometry` of a buffer has the numbers of its pages. What the steps pack is in
`k_pages.expected.npy` and its like, per-tensor scales in `tensor_scales.expected.npy`: the buffers themselves start empty.

Or let kvpack judge what your kernel, in any language, made of the inputs: save it as .npy and run

    kvpack validate --vectors FOLDER --result RESULT.npy

`--expect NAME` says what it is where several arrays have its shape.
";
