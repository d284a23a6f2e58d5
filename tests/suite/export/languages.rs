//! What the writers write, checked by the tools of each language.

use super::*;

fn spirv_val(file: &Path) -> Result<(), String> {
    tool("spirv-val", "spirv-tools", &["--target-env", "vulkan1.1"], file)
}

#[test]
fn spirv_passes_spirv_val() {
    let (folder, all) = written(ExportTarget::Spirv);
    each(&all, named, |(path, _)| spirv_val(path));
    common::say(&format!("kvpack: {} modules through spirv-val", all.len()));
    // A word of the code that is another is found.
    let mut bytes = fs::read(&all[0].0).unwrap();
    let middle = bytes.len() / 8 * 4;
    bytes[middle..middle + 4].fill(0xff);
    let broken = folder.path().join("broken.spv");
    fs::write(&broken, bytes).unwrap();
    spirv_val(&broken).unwrap_err();
}

/// By OpenGL's rules all in one process, but for subgroups, an extension that glslang knows for Vulkan only; by Vulkan's, with
/// code, those and the modules of the first choice.
#[test]
fn glsl_passes_glslang() {
    let (folder, all) = written(ExportTarget::Glsl);
    let plain: Vec<&str> = all
        .iter()
        .filter(|(_, entry)| entry.features.is_empty())
        .map(|(path, _)| path.to_str().unwrap())
        .collect();
    let glslang =
        |arguments: &[&str], file: &Path| tool("glslangValidator", "glslang-tools", arguments, file);
    let (last, others) = plain.split_last().unwrap();
    glslang(others, Path::new(last)).unwrap();
    let some: Vec<_> = all
        .iter()
        .filter(|item| named(item).starts_with("0-") || !item.1.features.is_empty())
        .collect();
    assert!(
        some.len() > 55 && plain.len() > 150,
        "{} of {}",
        some.len(),
        plain.len()
    );
    each(
        &some,
        |item| named(item),
        |(path, _)| glslang(&["-V", "--target-env", "vulkan1.1", "-o", "/dev/null"], path),
    );
    let broken = folder.path().join("broken.comp");
    let text = fs::read_to_string(&all[0].0).unwrap();
    fs::write(&broken, text.replacen("uint ", "uvec2 ", 1)).unwrap();
    glslang(&[], &broken).unwrap_err();
}

/// glslang reads HLSL too, but for one form that DXC takes: `(uint4[4])0` for zeros. It is spelled out here, and 16-bit
/// types, which are of shader model 6.2, are left out.
#[test]
fn hlsl_passes_glslang_with_zeros_spelled_out() {
    let (_folder, all) = written(ExportTarget::Hlsl);
    let all: Vec<_> = all
        .into_iter()
        .filter(|(_, entry)| entry.features.is_empty())
        .collect();
    each(&all, named, |(path, entry)| {
        let text = fs::read_to_string(path).unwrap();
        fs::write(path, zeros_spelled_out(&text)).unwrap();
        let arguments = [
            "-D",
            "-V",
            "-S",
            "comp",
            "-e",
            &entry.entry_point,
            "--target-env",
            "vulkan1.1",
            "--auto-map-bindings",
            "-o",
            "/dev/null",
        ];
        tool("glslangValidator", "glslang-tools", &arguments, path)
    });
    assert!(all.len() > 50, "{}", all.len());
}

/// `(float4[2])0` as the call of a function that makes it.
fn zeros_spelled_out(text: &str) -> String {
    let mut makers = BTreeSet::new();
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("])0") {
        let open = rest[..at].rfind('(').unwrap();
        let (of, count) = rest[open + 1..at].split_once('[').unwrap();
        let zeros = vec![format!("({of})0"); count.parse().unwrap()].join(", ");
        let name = format!("zeros_{count}_{of}");
        makers.insert(format!(
            "typedef {of} {name}_t[{count}];\n{name}_t {name}() {{ {of} z[{count}] = {{ {zeros} }}; return z; }}\n"
        ));
        out += &format!("{}{name}()", &rest[..open]);
        rest = &rest[at + 3..];
    }
    makers.into_iter().collect::<String>() + &out + rest
}

/// No Metal compiler runs here: what is checked is that the function is there and takes the buffers of the manifest.
#[test]
fn msl_and_hlsl_bind_what_the_manifest_says() {
    for target in [ExportTarget::Msl, ExportTarget::Hlsl, ExportTarget::Glsl] {
        let (_folder, all) = written(target);
        each(&all, named, |(path, entry)| {
            let text = fs::read_to_string(path).unwrap();
            let start = match target {
                ExportTarget::Msl => format!("kernel void {}(", entry.entry_point),
                _ => format!("void {}(", entry.entry_point),
            };
            if text.matches(&start).count() != 1 {
                return Err(format!("{start} does not stand once"));
            }
            for binding in &entry.bindings {
                let slot = binding.slot.as_deref().ok_or("no slot")?;
                // `buffer(3)` in MSL's double brackets, `register(t3)`, `binding = 3)`: each ends there.
                let stands = text.contains(&match target {
                    ExportTarget::Glsl => format!("{slot})"),
                    _ => slot.to_owned(),
                });
                if stands != binding.used {
                    return Err(format!("{}: {slot}, used: {}", binding.name, binding.used));
                }
            }
            for extra in &entry.extra_bindings {
                let runtime = text.contains("_mslBufferSizes& _buffer_sizes [[");
                if !text.contains(&extra.slot) && (target != ExportTarget::Msl || runtime) {
                    return Err(format!("no {}", extra.slot));
                }
            }
            Ok(())
        });
    }
}

#[test]
fn dev_14_float_to_integer_keeps_naga_s_clamp_in_msl() {
    // Scores in packed integers round queries: the one conversion that a large quotient could lead out of range.
    let export = export(&choices()[3], ExportTarget::Msl).unwrap();
    let packed = export
        .files
        .iter()
        .find(|(name, _)| name.contains("int4-int4-decode-packed"))
        .unwrap();
    let text = std::str::from_utf8(&packed.1).unwrap();
    assert!(
        text.contains("naga_f2i32") || text.contains("metal::clamp("),
        "{text}"
    );
}

#[test]
fn glsl_refuses_16_bit_arithmetic_by_name() {
    let refused = export(&choices()[2], ExportTarget::Glsl).unwrap_err();
    assert!(
        matches!(&refused, Error::Usage { asked, .. } if asked.contains("attention_split") && asked.contains("shader-f16")),
        "{refused}"
    );
}

#[test]
fn browser_files_compile_in_tint() {
    let (folder, all) = written(ExportTarget::WgslBrowser);
    let (code, text) = tint(&[folder.path(), &common::path("shaders/standalone")]);
    let last = text.lines().last().unwrap_or_default();
    assert_eq!(code, 0, "{}", text.chars().take(2000).collect::<String>());
    let standalone = Manifest::read(&common::path("shaders/standalone"))
        .unwrap()
        .modules
        .len();
    assert_eq!(last, format!("{} shaders, 0 failed", all.len() + standalone));
}
