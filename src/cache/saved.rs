//! A sequence as bytes: what [`crate::cache::KvCache::save`] gives and [`crate::cache::KvCache::restore`] takes. The
//! documentation of [`crate::cache`] has their layout.

use super::book::Book;
use super::sequence::{SequenceId, waiting_places};
use super::spec::{CacheSpec, K, MAX_TOKENS, TensorScales, V};
use crate::error::{Error, Result};
use crate::scales::ScaleLayout;
use crate::spec::Side;

const MAGIC: &[u8; 8] = b"kvpackSQ";
const VERSION: u32 = 1;

/// What of a saved sequence must be the same in the cache that restores it: the bytes, and their name for messages.
fn shape(spec: &CacheSpec) -> Vec<(String, Vec<u8>)> {
    let number = |what: &str, value: u32| (format!("{what} {value}"), value.to_le_bytes().to_vec());
    let text = |what: &str, side: Side| {
        let name = side.to_string();
        let mut bytes = (name.len() as u32).to_le_bytes().to_vec();
        bytes.extend(name.as_bytes());
        (format!("{what} {name}"), bytes)
    };
    let mut fields = vec![
        number("kv_heads", spec.kv_heads),
        number("k_head_dim", spec.k_head_dim),
        number("v_head_dim", spec.v_head_dim),
        number("page_tokens", spec.page_tokens),
        text("waiting side", spec.waiting),
        number("layers", spec.layers.len() as u32),
    ];
    for (number_of, layer) in spec.layers.iter().enumerate() {
        let of = |what: &str| format!("layer {number_of}: {what}");
        fields.push(text(&of("K side"), layer.pair.k));
        fields.push(text(&of("V side"), layer.pair.v));
        for (names, values) in [
            (["K window", "V window"], layer.window),
            (["K sink tokens", "V sink tokens"], layer.sink_tokens),
        ] {
            fields.extend([K, V].map(|s| number(&of(names[s]), values[s])));
        }
        for (s, side) in [layer.pair.k, layer.pair.v].into_iter().enumerate() {
            let scale = match (&spec.tensor_scales, side.layout) {
                (TensorScales::Given(given), ScaleLayout::PerTensor) => given[number_of][s],
                _ => 0.0,
            };
            let bytes = scale.to_bits().to_le_bytes().to_vec();
            let name = ["K per-tensor scale", "V per-tensor scale"][s];
            fields.push((format!("{} {scale:e}", of(name)), bytes));
        }
    }
    fields
}

/// Whether a field is the last one before a layer's boundaries.
fn ends_layer(field: usize) -> bool {
    field >= FIELDS && (field - FIELDS) % LAYER_FIELDS == LAYER_FIELDS - 1
}

/// Fields before the first layer's, and of each layer.
const FIELDS: usize = 6;
const LAYER_FIELDS: usize = 8;

/// Refuses to save where scales may change under the bytes, or keys are not what the bytes say.
pub(super) fn check(spec: &CacheSpec) -> Result<()> {
    let (reason, advice) = if spec.scales_from_rows() {
        (
            "its per-tensor scales come from the rows of one step",
            "use calibrated scales",
        )
    } else if spec.key_rotation.is_some() {
        (
            "its keys are stored before rotation, which the bytes do not say",
            "store rotated keys",
        )
    } else {
        return Ok(());
    };
    Err(Error::Usage {
        asked: "to save or restore a sequence".to_owned(),
        reason: reason.to_owned(),
        advice: advice.to_owned(),
    })
}

/// What comes before the words of a sequence's pages.
pub(super) fn head(book: &Book, id: SequenceId) -> Result<Vec<u8>> {
    let spec = book.spec();
    check(spec)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    let mut layer = 0;
    for (i, (_, field)) in shape(spec).into_iter().enumerate() {
        bytes.extend(field);
        if ends_layer(i) {
            bytes.extend(book.boundaries(id, layer)?.iter().flat_map(|b| b.to_le_bytes()));
            layer += 1;
        }
    }
    bytes.extend(book.len(id)?.to_le_bytes());
    Ok(bytes)
}

/// The whole: the head, the live words of the pages in the order of [`Book::held_pages`], the checksum.
pub(super) fn finish(head: Vec<u8>, words: &[u32]) -> Vec<u8> {
    let mut bytes = head;
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    bytes
}

fn refuse<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::Restore {
        reason: reason.into(),
    })
}

/// Reads bytes from the front.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        match self.0.split_at_checked(count) {
            Some((taken, rest)) => {
                self.0 = rest;
                Ok(taken)
            }
            None => refuse("the bytes end too early"),
        }
    }

    fn number(&mut self) -> Result<u32> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }
}

/// Opens a sequence for saved bytes: its id, and the words of its pages in the order of [`Book::held_pages`]. All or
/// nothing.
pub(super) fn decode(book: &mut Book, bytes: &[u8]) -> Result<(SequenceId, Vec<u32>)> {
    check(book.spec())?;
    let Some((content, sum)) = bytes.split_last_chunk::<4>() else {
        return refuse("there are fewer bytes than a checksum has");
    };
    let mut cursor = Cursor(content);
    if cursor.take(MAGIC.len()).ok() != Some(&MAGIC[..]) {
        return refuse("the bytes do not begin like a saved sequence");
    }
    let version = cursor.number()?;
    if version != VERSION {
        return refuse(format!(
            "they have version {version}, and this is made for {VERSION}"
        ));
    }
    if crc32fast::hash(content) != u32::from_le_bytes(*sum) {
        return refuse("the checksum is wrong: some bytes have changed, or are missing");
    }
    let mut boundaries = Vec::new();
    for (i, (name, field)) in shape(book.spec()).into_iter().enumerate() {
        if cursor.take(field.len()).ok() != Some(&field[..]) {
            return refuse(format!(
                "they are from a cache of another spec: this one has {name}, and they do not"
            ));
        }
        if ends_layer(i) {
            boundaries.push([cursor.number()?, cursor.number()?]);
        }
    }
    let len = cursor.number()?;
    let geometry = book.geometry();
    let same = |class: &super::Class| {
        let of = |&layer: &u32| boundaries[layer as usize];
        class.layers.iter().all(|layer| of(layer) == of(&class.layers[0]))
    };
    if !geometry.classes.iter().all(same) {
        return refuse("layers that are stored alike are packed up to different tokens");
    }
    let by_class: Vec<_> = geometry
        .classes
        .iter()
        .map(|class| boundaries[class.layers[0] as usize])
        .collect();
    // Sizes in 64 bits, before a page is taken: what the bytes claim must be what they hold.
    let words = cursor.0.len() as u64 / 4;
    if len > MAX_TOKENS || words_of(book, len, &by_class) != Some(words) || cursor.0.len() % 4 != 0 {
        return refuse("their number does not fit the tokens they claim to hold");
    }
    let id = book.adopt(len, &by_class)?;
    let words = cursor.0.chunks_exact(4);
    let words = words.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    Ok((id, words.collect()))
}

/// Words of the pages of a sequence in such a state.
fn words_of(book: &Book, len: u32, boundaries: &[[u32; 2]]) -> Option<u64> {
    let geometry = book.geometry();
    let page_tokens = geometry.page_tokens;
    let mut words = 0_u64;
    for (class, boundaries) in geometry.classes.iter().zip(boundaries) {
        for s in [K, V] {
            let packed = u64::from(boundaries[s].div_ceil(page_tokens)) * u64::from(class.packed[s].words);
            let waiting = class.waiting[s].map_or(0, |page| {
                let pages = waiting_places(page_tokens, class.sink_tokens[s], boundaries[s], len);
                pages * u64::from(page.words)
            });
            words = words.checked_add((packed + waiting).checked_mul(class.layers.len() as u64)?)?;
        }
    }
    Some(words)
}
