//! The composer: plain WGSL files joined into one module.
//!
//! It joins parts in order, each once; moves `enable` lines to the top; replaces the value of a line that starts
//! `const NAME: type =`; makes copies of a *side part* whose names begin with `side_` / `SIDE_` under another prefix;
//! appends a few lines of glue that give a format's functions the names that kernels call. There are no conditionals and
//! no templates: a choice between implementations is a choice of part, or a constant.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::formats::Element;
use crate::pages::PageLayout;
use crate::scales::ScaleType;

/// Who compiles the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// naga, through wgpu: refuses the line `enable subgroups;`, so it is left out.
    Naga,
    /// Browsers and other users of Tint: the standard's text.
    Standard,
}

/// The line that separates a format's decoder from its encoder in its file.
const ENCODE_MARK: &str = "// ---- encode ----\n";

/// A shader in the making.
#[derive(Debug, Clone)]
pub struct Composer {
    kernel: String,
    parts: Vec<(String, String)>,
    constants: BTreeMap<String, String>,
    glue: Vec<String>,
}

impl Composer {
    /// Starts with the file of a kernel.
    pub fn new(kernel: &str, text: &str) -> Composer {
        let parts = vec![(kernel.to_owned(), text.to_owned())];
        Composer {
            kernel: kernel.to_owned(),
            parts,
            constants: BTreeMap::new(),
            glue: Vec::new(),
        }
    }

    /// The kernel's name, which is its entry point.
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// Adds a part, unless one of that name is there.
    pub fn part(&mut self, name: &str, text: &str) -> &mut Composer {
        if !self.parts.iter().any(|(known, _)| known == name) {
            self.parts.push((name.to_owned(), text.to_owned()));
        }
        self
    }

    /// Adds a copy of a side part with `side_` / `SIDE_` names under `prefix` (for example `k`).
    pub fn side_part(&mut self, prefix: &str, name: &str, text: &str) -> &mut Composer {
        let name = format!("{name} for {prefix}");
        self.part(&name, &with_prefix(text, prefix))
    }

    /// Sets the value of the line `const NAME: type = ...;`.
    pub fn set(&mut self, name: &str, value: impl Constant) -> &mut Composer {
        self.constants.insert(name.to_owned(), value.wgsl());
        self
    }

    /// Adds a line of glue.
    pub fn glue(&mut self, line: String) -> &mut Composer {
        if !self.glue.contains(&line) {
            self.glue.push(line);
        }
        self
    }

    /// Adds what reading one side's pages takes, under `prefix`: geometry, decoder, scales.
    pub fn reads_side(&mut self, prefix: &str, page: &PageLayout) -> &mut Composer {
        self.geometry(prefix, page);
        self.side_part(
            prefix,
            "parts/read_side",
            include_str!("../shaders/parts/read_side.wgsl"),
        );
        let layout = page.side.layout;
        self.side_part(prefix, &format!("scales/{}", layout.name()), layout.wgsl());
        self.decoder(prefix, page.side.element)
            .scale_values(prefix, page.side.scale)
    }

    /// Adds the geometry constants of one side under `prefix`.
    pub fn geometry(&mut self, prefix: &str, page: &PageLayout) -> &mut Composer {
        self.side_part(prefix, "parts/side", include_str!("../shaders/parts/side.wgsl"));
        let name = |constant: &str| with_prefix(&format!("SIDE_{constant}"), prefix);
        for (constant, value) in [
            ("BITS", page.side.element.bits()),
            ("HEADS", page.heads),
            ("HEAD_DIM", page.head_dim),
            ("HEAD_WORDS", page.head_words),
            ("PAGE_TOKENS", page.tokens),
            ("PAGE_WORDS", page.words),
            ("SCALE_OFFSET", page.scale_offset),
            ("SCALE_BITS", page.side.scale.bits()),
            ("GROUP", page.side.layout.token_group()),
        ] {
            self.set(&name(constant), value);
        }
        self
    }

    /// Adds what packing one side takes (names begin with `side_`): encoder, scale rounding. `largest` is split into an
    /// odd number and a power of two, since the shader divides by small odd numbers only.
    pub fn writes_side(&mut self, page: &PageLayout) -> &mut Composer {
        self.geometry("side", page);
        self.part("parts/encode", include_str!("../shaders/parts/encode.wgsl"));
        self.part(
            "parts/write_side",
            include_str!("../shaders/parts/write_side.wgsl"),
        );
        self.encoder("side", page.side.element);
        self.scale_values("side", page.side.scale);
        let scale = page.side.scale;
        self.part(&format!("scales/stored_{}", scale.name()), scale.wgsl());
        self.rounds_small_floats();
        self.glue(format!(
            "fn side_scale_from(amax: u32, odd: u32, power: i32) -> vec2<u32> {{ return stored_{}_from(amax, odd, power); }}",
            scale.name()
        ))
    }

    /// Sets `LARGEST_ODD` and `LARGEST_POWER`: the element's largest code as odd x 2^power.
    pub fn largest(&mut self, element: Element) -> &mut Composer {
        let (odd, power) = odd_and_power(element);
        self.set("LARGEST_ODD", odd).set("LARGEST_POWER", power)
    }

    /// Adds the rounding to small floats.
    pub fn rounds_small_floats(&mut self) -> &mut Composer {
        self.part(
            "parts/small_float",
            include_str!("../shaders/parts/small_float.wgsl"),
        )
    }

    /// Adds `f16_widen`.
    pub fn widens_f16(&mut self) -> &mut Composer {
        self.part("formats/f16", decode_half(Element::F16))
    }

    fn decoder(&mut self, prefix: &str, element: Element) -> &mut Composer {
        let format = element.info().name;
        self.part(&format!("formats/{format}"), decode_half(element));
        self.glue(format!(
            "fn {prefix}_decode4(words: vec4<u32>, quad: u32) -> vec4<f32> {{ return {format}_decode4(words, quad); }}"
        ))
    }

    /// Adds `<prefix>_half4`: codes decoded to f16.
    pub fn halves(&mut self, prefix: &str, element: Element) -> &mut Composer {
        let value = match element {
            Element::F16 => {
                "vec4<f16>(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)))".to_owned()
            }
            _ => format!("vec4<f16>({prefix}_decode4(words, quad))"),
        };
        self.glue(format!(
            "fn {prefix}_half4(words: vec4<u32>, quad: u32) -> vec4<f16> {{ return {value}; }}"
        ))
    }

    /// Adds `<prefix>_packed`, codes as packed bytes, with their bias and unit. Only for integers and E2M1.
    pub fn packed_bytes(&mut self, prefix: &str, element: Element) -> &mut Composer {
        let format = element.info().name;
        let (bias, unit) = match element {
            Element::Int4 => (8, 1.0_f32),
            Element::Int2 => (2, 1.0),
            Element::E2m1 => (12, 0.5),
            _ => (0, 1.0),
        };
        let upper = prefix.to_uppercase();
        self.set(&format!("{upper}_BIAS"), bias)
            .set(&format!("{upper}_UNIT"), unit)
            .glue(format!(
                "fn {prefix}_packed(word: u32, part: u32) -> u32 {{ return {format}_packed(word, part); }}"
            ))
    }

    fn encoder(&mut self, prefix: &str, element: Element) -> &mut Composer {
        let format = element.info().name;
        self.part(&format!("formats/{format} encoder"), encode_half(element));
        if element == Element::F16 {
            self.rounds_small_floats();
        } else if element != Element::F32 {
            self.part("parts/quotient", include_str!("../shaders/parts/quotient.wgsl"));
        }
        self.glue(format!(
            "fn {prefix}_encode(x: u32, s: f32) -> vec2<u32> {{ return {format}_encode(x, s); }}"
        ))
    }

    fn scale_values(&mut self, prefix: &str, scale: ScaleType) -> &mut Composer {
        // A scale is decoded by the element format of the same kind.
        let element = scale.element();
        let format = element.info().name;
        self.part(&format!("formats/{format}"), decode_half(element));
        self.glue(format!(
            "fn {prefix}_scale_values(bits: vec4<u32>) -> vec4<f32> {{ return {format}_values(bits); }}"
        ))
    }

    /// Joins everything.
    ///
    /// # Errors
    /// [`Error::Shader`] where a constant that was set stands nowhere or twice.
    pub fn compose(&self, target: Target) -> Result<String> {
        let mut enables = Vec::new();
        let mut body = String::new();
        let mut replaced: BTreeMap<&str, u32> =
            self.constants.keys().map(|name| (name.as_str(), 0)).collect();
        for (name, text) in &self.parts {
            body.push_str(&format!("// ======== {name}\n"));
            for line in text.lines() {
                if line.starts_with("enable ") {
                    let refused = target == Target::Naga && line == "enable subgroups;";
                    if !refused && !enables.contains(&line) {
                        enables.push(line);
                    }
                    continue;
                }
                let set = constant_line(line).map(|parts| (parts, self.constants.get_key_value(parts.name)));
                match set {
                    Some((parts, Some((name, value)))) => {
                        *replaced.entry(name).or_default() += 1;
                        body.push_str(&format!(
                            "const {}: {} = {value};{}\n",
                            parts.name, parts.kind, parts.comment
                        ));
                    }
                    _ => {
                        body.push_str(line);
                        body.push('\n');
                    }
                }
            }
            body.push('\n');
        }
        if let Some((name, times)) = replaced.into_iter().find(|(_, times)| *times != 1) {
            let message =
                format!("constant {name} was set and stands {times} times in the parts; it must stand once");
            return Err(Error::Shader {
                kernel: self.kernel.clone(),
                message,
            });
        }
        if !self.glue.is_empty() {
            body.push_str("// ======== the names that the kernel calls\n");
            for line in &self.glue {
                body.push_str(line);
                body.push('\n');
            }
        }
        let enables: String = enables.iter().map(|line| format!("{line}\n")).collect();
        Ok(enables + &body)
    }
}

/// An element's largest code as odd x 2^power.
fn odd_and_power(element: Element) -> (u32, i32) {
    let largest = element.info().max as u32;
    (
        largest >> largest.trailing_zeros(),
        largest.trailing_zeros() as i32,
    )
}

fn decode_half(element: Element) -> &'static str {
    let text = element.info().wgsl;
    text.split_once(ENCODE_MARK).map_or(text, |(decode, _)| decode)
}

fn encode_half(element: Element) -> &'static str {
    element
        .info()
        .wgsl
        .split_once(ENCODE_MARK)
        .map_or("", |(_, encode)| encode)
}

#[derive(Clone, Copy)]
struct ConstantLine<'a> {
    name: &'a str,
    kind: &'a str,
    comment: &'a str,
}

/// Takes `const NAME: type = value; // comment` apart.
fn constant_line(line: &str) -> Option<ConstantLine<'_>> {
    let (name, rest) = line.strip_prefix("const ")?.split_once(": ")?;
    let (kind, rest) = rest.split_once(" = ")?;
    let (_, comment) = rest.split_once(';')?;
    Some(ConstantLine { name, kind, comment })
}

/// The text with every word that begins with `side_`, `SIDE_` (or is a member `.side_...`) under another prefix.
fn with_prefix(text: &str, prefix: &str) -> String {
    let upper = prefix.to_uppercase();
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c.is_ascii_alphanumeric() || c == '_') {
        let (before, word) = rest.split_at(at);
        let end = word
            .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
            .unwrap_or(word.len());
        let (word, after) = word.split_at(end);
        out.push_str(before);
        match (word.strip_prefix("side_"), word.strip_prefix("SIDE_")) {
            (Some(name), _) => out.push_str(&format!("{prefix}_{name}")),
            (_, Some(name)) => out.push_str(&format!("{upper}_{name}")),
            _ => out.push_str(word),
        }
        rest = after;
    }
    out + rest
}

/// A value that the composer can write into a constant.
pub trait Constant {
    /// The value as WGSL.
    fn wgsl(&self) -> String;
}

impl Constant for u32 {
    fn wgsl(&self) -> String {
        format!("{self}u")
    }
}

impl Constant for i32 {
    fn wgsl(&self) -> String {
        self.to_string()
    }
}

impl Constant for f32 {
    fn wgsl(&self) -> String {
        format!("{self:?}")
    }
}

impl Constant for bool {
    fn wgsl(&self) -> String {
        self.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_must_stand_exactly_once() {
        let mut composer = Composer::new("k", "const A: u32 = 1u; // why\nfn k() {}\n");
        composer.set("A", 7_u32);
        assert!(
            composer
                .compose(Target::Naga)
                .unwrap()
                .contains("const A: u32 = 7u; // why\n")
        );
        composer.set("B", 1_u32);
        assert!(
            composer
                .compose(Target::Naga)
                .unwrap_err()
                .to_string()
                .contains("constant B")
        );
        let mut twice = Composer::new("k", "const A: u32 = 1u;\n");
        twice.part("other", "const A: u32 = 1u;\n").set("A", 2_u32);
        assert!(
            twice
                .compose(Target::Naga)
                .unwrap_err()
                .to_string()
                .contains("2 times")
        );
    }

    #[test]
    fn enable_lines_move_to_the_top_and_subgroups_is_left_out_for_naga() {
        let mut composer = Composer::new("k", "fn k() {}\n");
        composer
            .part("p", "enable f16;\nenable subgroups;\nfn p() {}\n")
            .part("q", "enable f16;\n");
        assert!(
            composer
                .compose(Target::Standard)
                .unwrap()
                .starts_with("enable f16;\nenable subgroups;\n// =")
        );
        assert!(
            composer
                .compose(Target::Naga)
                .unwrap()
                .starts_with("enable f16;\n// =")
        );
    }

    #[test]
    fn prefixes_change_whole_words_only() {
        assert_eq!(
            with_prefix("side_a(SIDE_B, beside_c, x.side_d)", "k"),
            "k_a(K_B, beside_c, x.k_d)"
        );
    }
}
