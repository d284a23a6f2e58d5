//! K and V tensors in files: safetensors with any number of them, or one array as `.npy`.

use std::path::{Path, PathBuf};

use super::npy::Npy;
use super::{AnalyzeRow, KvRows, Label, Which, measure};
use crate::checkpoint::safetensors::SafetensorsFile;
use crate::error::{Error, Result};
use crate::spec::Side;

/// Which axis of a tensor is which, after a leading one of layers, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Axes {
    /// `[tokens, heads, head_dim]`.
    #[default]
    TokensFirst,
    /// `[heads, tokens, head_dim]`, as the caches of many programs have it.
    HeadsFirst,
}

/// An open file of tensors.
#[derive(Debug)]
pub struct Dump {
    path: PathBuf,
    source: Source,
    tensors: Vec<Tensor>,
    axes: Axes,
}

#[derive(Debug)]
enum Source {
    Safetensors(SafetensorsFile),
    Npy(Npy),
}

#[derive(Debug)]
struct Tensor {
    label: Label,
    /// Extent of the leading axis of layers, if there is one.
    layers: Option<u32>,
    tokens: u32,
    heads: u32,
    head_dim: u32,
}

/// What was measured, and the formats that a tensor's shape has no room for, each with the reason.
#[derive(Debug)]
pub struct Analysis {
    /// A row for each layer and side of the file, and format.
    pub rows: Vec<AnalyzeRow>,
    /// What was left out: a tensor's name, the format and why.
    pub left_out: Vec<(String, Side, Error)>,
}

impl Dump {
    /// Opens a `.safetensors` or `.npy` file and checks the shapes of its tensors, or of those in `only` if it names any.
    ///
    /// # Errors
    /// [`Error::Usage`] for a file that is neither or is damaged, a name that it lacks, and a tensor that has not three
    /// axes, or four with one of layers first.
    pub fn open(path: &Path, axes: Axes, only: &[String]) -> Result<Dump> {
        let ending = path.extension().and_then(|ending| ending.to_str());
        let mut dump = Dump {
            path: path.to_owned(),
            source: match ending.map(str::to_ascii_lowercase).as_deref() {
                Some("safetensors") => Source::Safetensors(SafetensorsFile::open(path)?),
                Some("npy") => Source::Npy(Npy::open(path)?),
                _ => {
                    return Err(refuse(
                        path,
                        "the end of its name is neither .safetensors nor .npy",
                    ));
                }
            },
            tensors: Vec::new(),
            axes,
        };
        let shapes: Vec<(String, Vec<u64>)> = match &dump.source {
            Source::Safetensors(file) => file
                .names()
                .map(|name| (name.to_owned(), file.shape(name).unwrap_or_default()))
                .collect(),
            Source::Npy(file) => {
                let stem = path.file_stem().and_then(|stem| stem.to_str());
                vec![(stem.unwrap_or("array").to_owned(), file.shape().to_vec())]
            }
        };
        if let Some(missing) = only
            .iter()
            .find(|asked| !shapes.iter().any(|(name, _)| name == *asked))
        {
            let names: Vec<_> = shapes.iter().take(8).map(|(name, _)| name.as_str()).collect();
            return Err(refuse(
                path,
                format!(
                    "it has no tensor `{missing}`; it has {}: {}",
                    shapes.len(),
                    names.join(", ")
                ),
            ));
        }
        for (name, shape) in shapes {
            if only.is_empty() || only.contains(&name) {
                dump.tensors.push(tensor(path, name, &shape, axes)?);
            }
        }
        if dump.tensors.is_empty() {
            return Err(refuse(path, "it has no tensors"));
        }
        dump.tensors
            .sort_by_key(|tensor| (tensor.label.layer, tensor.label.which));
        Ok(dump)
    }

    /// Measures every format on every tensor, reading one tensor after the other. `progress` hears how many rows are
    /// done, of how many, and what is next.
    ///
    /// # Errors
    /// [`Error::Usage`] without formats and for numbers that cannot be read or are not finite, named by tensor and index;
    /// where no format fits any tensor, the first reason.
    pub fn analyze(&mut self, sides: &[Side], progress: &mut dyn FnMut(u64, u64, &str)) -> Result<Analysis> {
        if sides.is_empty() {
            return Err(refuse(&self.path, "no formats were named"));
        }
        let blocks: u64 = self
            .tensors
            .iter()
            .map(|tensor| u64::from(tensor.layers.unwrap_or(1)))
            .sum();
        let of = blocks * sides.len() as u64;
        let mut analysis = Analysis {
            rows: Vec::new(),
            left_out: Vec::new(),
        };
        let mut done = 0;
        for tensor in &self.tensors {
            let name = &tensor.label.tensor;
            progress(done, of, name);
            let numbers = match &mut self.source {
                Source::Safetensors(file) => file.read(name)?,
                Source::Npy(file) => file.read(name)?,
            };
            let block = tensor.tokens as usize * (tensor.heads * tensor.head_dim) as usize;
            for (layer, numbers) in (0..).zip(numbers.chunks_exact(block)) {
                let turned;
                let numbers = match self.axes {
                    Axes::TokensFirst => numbers,
                    Axes::HeadsFirst => {
                        turned = tokens_first(numbers, tensor);
                        &turned
                    }
                };
                let label = Label {
                    layer: tensor.layers.map_or(tensor.label.layer, |_| Some(layer)),
                    ..tensor.label.clone()
                };
                for &side in sides {
                    let rows = KvRows {
                        heads: tensor.heads,
                        head_dim: tensor.head_dim,
                        numbers,
                    };
                    match measure(&label, rows, side) {
                        Ok(row) => analysis.rows.push(row),
                        Err(error @ Error::Shape { .. }) if layer == 0 => {
                            analysis.left_out.push((name.clone(), side, error));
                        }
                        Err(Error::Shape { .. }) => {}
                        Err(error) => return Err(error),
                    }
                    done += 1;
                    progress(done, of, name);
                }
            }
        }
        if analysis.rows.is_empty() && !analysis.left_out.is_empty() {
            return Err(analysis.left_out.swap_remove(0).2);
        }
        Ok(analysis)
    }
}

fn refuse(path: &Path, reason: impl Into<String>) -> Error {
    Error::Usage {
        asked: format!("K and V of `{}`", path.display()),
        reason: reason.into(),
        advice: "give a .safetensors or .npy file of tensors [tokens, heads, head_dim], one of layers before them or \
                 not, and choose with --tensor where it has others too"
            .to_owned(),
    }
}

fn tensor(path: &Path, name: String, shape: &[u64], axes: Axes) -> Result<Tensor> {
    let wrong = |what: &str| refuse(path, format!("tensor `{name}` has shape {shape:?}: {what}"));
    let (layers, rest) = match shape {
        [layers, rest @ ..] if rest.len() == 3 => (Some(*layers), rest),
        rest if rest.len() == 3 => (None, rest),
        _ => return Err(wrong("it has not three axes, or four with one of layers first")),
    };
    if shape.contains(&0) {
        return Err(wrong("it has no numbers"));
    }
    let (tokens, heads) = match axes {
        Axes::TokensFirst => (rest[0], rest[1]),
        Axes::HeadsFirst => (rest[1], rest[0]),
    };
    let number = |extent: u64| u32::try_from(extent).map_err(|_| wrong("an axis is longer than any cache"));
    let (heads, head_dim) = (number(heads)?, number(rest[2])?);
    if heads.checked_mul(head_dim).is_none() {
        return Err(wrong("a row is longer than any cache's"));
    }
    let (mut layer, which) = told(&name);
    let mut layers = layers.map(number).transpose()?;
    // A batch of one, as caches are often dumped: the name says which layer it is.
    if layers == Some(1) && layer.is_some() {
        layers = None;
    }
    if layers.is_some() {
        layer = None;
    }
    Ok(Tensor {
        layers,
        tokens: number(tokens)?,
        heads,
        head_dim,
        label: Label {
            tensor: name,
            layer,
            which,
        },
    })
}

/// Layer and side that a name tells: `model.layers.3.self_attn.k_proj`, `past_key_values.3.value`, `key_cache_3`, `l3.k`.
/// The side is the last word of k, key(s), v, value(s); the layer the number after layer(s), block(s), blk, h or l, else
/// the only number.
fn told(name: &str) -> (Option<u32>, Option<Which>) {
    let mut words: Vec<String> = Vec::new();
    let mut last = None;
    for c in name.chars() {
        let kind = (c.is_alphabetic(), c.is_ascii_digit());
        if kind == (false, false) {
            last = None;
            continue;
        }
        match words.last_mut() {
            Some(word) if last == Some(kind) => word.extend(c.to_lowercase()),
            _ => words.push(c.to_lowercase().collect()),
        }
        last = Some(kind);
    }
    let which = words.iter().rev().find_map(|word| match word.as_str() {
        "k" | "key" | "keys" => Some(Which::K),
        "v" | "value" | "values" => Some(Which::V),
        _ => None,
    });
    let number = |word: &String| word.parse::<u32>().ok();
    let named = words.windows(2).find_map(|pair| {
        let layers = ["layer", "layers", "block", "blocks", "blk", "h", "l"];
        number(&pair[1]).filter(|_| layers.contains(&pair[0].as_str()))
    });
    let mut numbers = words.iter().filter_map(number);
    let only = numbers.next().filter(|_| numbers.next().is_none());
    (named.or(only), which)
}

/// `[heads, tokens, head_dim]` as `[tokens, heads, head_dim]`.
fn tokens_first(numbers: &[f32], tensor: &Tensor) -> Vec<f32> {
    let (tokens, heads, head_dim) = (
        tensor.tokens as usize,
        tensor.heads as usize,
        tensor.head_dim as usize,
    );
    let mut turned = Vec::with_capacity(numbers.len());
    for token in 0..tokens {
        for head in 0..heads {
            turned.extend_from_slice(&numbers[(head * tokens + token) * head_dim..][..head_dim]);
        }
    }
    turned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_layer_and_side() {
        use Which::{K, V};
        for (name, expected) in [
            ("model.layers.3.self_attn.k_proj", (Some(3), Some(K))),
            ("past_key_values.12.value", (Some(12), Some(V))),
            ("past_key_values.12.key", (Some(12), Some(K))),
            ("key_cache_7", (Some(7), Some(K))),
            ("layer3_V", (Some(3), Some(V))),
            ("run 5, layer 2, keys", (Some(2), Some(K))),
            ("l0.values", (Some(0), Some(V))),
            ("k", (None, Some(K))),
            ("block1.2.v", (Some(1), Some(V))),
            ("1.2.v", (None, Some(V))),
            ("kv", (None, None)),
            ("valve", (None, None)),
            ("99999999999.k", (None, Some(K))),
            ("", (None, None)),
        ] {
            assert_eq!(told(name), expected, "{name}");
        }
    }

    #[test]
    fn heads_before_tokens_are_turned() {
        let tensor = tensor(Path::new("x"), "k".to_owned(), &[2, 3, 2], Axes::HeadsFirst).unwrap();
        assert_eq!((tensor.tokens, tensor.heads, tensor.head_dim), (3, 2, 2));
        let numbers: Vec<f32> = (0..12).map(|i| i as f32).collect();
        assert_eq!(
            tokens_first(&numbers, &tensor),
            [0.0, 1.0, 6.0, 7.0, 2.0, 3.0, 8.0, 9.0, 4.0, 5.0, 10.0, 11.0]
        );
    }

    #[test]
    fn shapes_that_are_no_cache_are_refused_by_name() {
        for shape in [
            &[][..],
            &[4],
            &[4, 4],
            &[1, 1, 1, 1, 1],
            &[0, 1, 8],
            &[1 << 40, 1, 8],
            &[1, 1 << 20, 1 << 20],
        ] {
            let said = tensor(Path::new("x"), "odd".to_owned(), shape, Axes::TokensFirst);
            let said = said.unwrap_err().to_string();
            assert!(said.contains("tensor `odd` has shape"), "{said}");
        }
        let batch = tensor(
            Path::new("x"),
            "layers.4.k".to_owned(),
            &[1, 5, 1, 8],
            Axes::TokensFirst,
        );
        let batch = batch.unwrap();
        assert_eq!(
            (batch.layers, batch.label.layer, batch.tokens),
            (None, Some(4), 5)
        );
        let stacked = tensor(
            Path::new("x"),
            "run4.k".to_owned(),
            &[3, 5, 1, 8],
            Axes::TokensFirst,
        )
        .unwrap();
        assert_eq!((stacked.layers, stacked.label.layer), (Some(3), None));
    }
}
