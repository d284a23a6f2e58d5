//! Text to token ids and back.

use std::panic::catch_unwind;
use std::path::Path;

use serde::de::IgnoredAny;
use tokenizers::decoders::byte_level::ByteLevel as ByteLevelDecoder;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::gguf::{Field, Gguf};
use super::refuse;
use crate::error::{Error, Result};

/// The tokenizer of a checkpoint.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// A token that every text starts with, where the tokenizer itself does not put it there.
    first: Option<u32>,
}

/// How the pre-tokenizer `llama-bpe` cuts a text into words.
const LLAMA_BPE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Tokenizer {
    /// From a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a file that cannot be read or is no tokenizer.
    pub fn from_json(path: &Path) -> Result<Tokenizer> {
        let bytes = super::read_whole(path)?;
        let no_tokenizer =
            |error: &dyn std::fmt::Display| refuse(path, format!("it is no tokenizer: {error}"));
        // The crate expects JSON of its own making: it panics at some that is broken, and at some values of the wrong type.
        serde_json::from_slice::<IgnoredAny>(&bytes).map_err(|error| no_tokenizer(&error))?;
        let mut inner = catch_unwind(|| tokenizers::Tokenizer::from_bytes(&bytes))
            .map_err(|_| no_tokenizer(&"a value has the wrong type"))?
            .map_err(|error| no_tokenizer(&error))?;
        // A file may ask for a fixed length, which is a matter of training.
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|error| no_tokenizer(&error))?;
        Ok(Tokenizer { inner, first: None })
    }

    /// Byte-level BPE from the vocabulary and merges of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Usage`] with the field's name for what is missing or wrong, and for other kinds of tokenizer.
    pub(super) fn from_gguf(file: &mut Gguf) -> Result<Tokenizer> {
        let text = |name: &str| match file.field(name) {
            Some(Field::Text(text)) => Some(text.clone()),
            _ => None,
        };
        let model = text("tokenizer.ggml.model")
            .ok_or_else(|| file.refuse("it has no field `tokenizer.ggml.model`"))?;
        if model != "gpt2" {
            return Err(file.refuse(format!(
                "field `tokenizer.ggml.model` is `{model}`; known is gpt2, byte-level BPE"
            )));
        }
        let pre = text("tokenizer.ggml.pre").unwrap_or_else(|| "gpt-2".to_owned());
        let words: PreTokenizerWrapper = match pre.as_str() {
            "gpt-2" => ByteLevel::new(false, true, true).into(),
            "smollm" => Sequence::new(vec![
                Digits::new(true).into(),
                ByteLevel::new(false, true, true).into(),
            ])
            .into(),
            "llama-bpe" => {
                let pattern = SplitPattern::Regex(LLAMA_BPE.to_owned());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                    .map_err(|error| wrong(file, &error))?;
                Sequence::new(vec![split.into(), ByteLevel::new(false, true, false).into()]).into()
            }
            other => {
                return Err(file.refuse(format!(
                    "field `tokenizer.ggml.pre` is `{other}`; known are gpt-2, smollm and llama-bpe"
                )));
            }
        };
        let first = first_token(file, &pre)?;
        let tokens = needed(file, "tokenizer.ggml.tokens")?;
        let mut merges = Vec::new();
        for (i, merge) in needed(file, "tokenizer.ggml.merges")?.into_iter().enumerate() {
            let (left, right) = merge
                .split_once(' ')
                .ok_or_else(|| file.refuse(format!("field `tokenizer.ggml.merges` has no pair at {i}")))?;
            merges.push((left.to_owned(), right.to_owned()));
        }
        let kinds = file.integers("tokenizer.ggml.token_type")?.unwrap_or_default();
        let mut special = Vec::new();
        let mut plain = Vec::new();
        let mut vocabulary = Vocab::default();
        for (i, token) in tokens.into_iter().enumerate() {
            match kinds.get(i) {
                Some(3) => special.push(AddedToken::from(token.clone(), true)),
                Some(4) => plain.push(AddedToken::from(token.clone(), false).normalized(false)),
                _ => {}
            }
            if let Some(earlier) = vocabulary.insert(token, i as u32) {
                return Err(file.refuse(format!(
                    "field `tokenizer.ggml.tokens` has the same token at {earlier} and {i}"
                )));
            }
        }
        let bpe = BPE::builder()
            .vocab_and_merges(vocabulary, merges)
            .ignore_merges(pre == "llama-bpe")
            .build()
            .map_err(|error| wrong(file, &error))?;
        let mut inner = tokenizers::Tokenizer::new(bpe);
        inner
            .with_pre_tokenizer(Some(words))
            .with_decoder(Some(ByteLevelDecoder::default()));
        inner
            .add_special_tokens(special)
            .and_then(|_| inner.add_tokens(plain))
            .map_err(|error| wrong(file, &error))?;
        Ok(Tokenizer { inner, first })
    }

    /// One more than the largest id.
    pub fn size(&self) -> u32 {
        let ids = self.inner.get_vocab(true).into_values().chain(self.first);
        ids.max().map_or(0, |largest| largest.saturating_add(1))
    }

    /// The ids of a text, with those that the tokenizer puts before every text. Special tokens in the text are read as
    /// such.
    ///
    /// # Errors
    /// [`Error::Usage`] for a text that the tokenizer refuses.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoded = self.inner.encode_fast(text, true).map_err(|error| Error::Usage {
            asked: format!("token ids of a text of {} bytes", text.len()),
            reason: error.to_string(),
            advice: "check the tokenizer of the model".to_owned(),
        })?;
        Ok(self
            .first
            .into_iter()
            .chain(encoded.get_ids().iter().copied())
            .collect())
    }

    /// The text of ids, special tokens left out. Bytes that are no UTF-8, as where a letter is not complete yet, become
    /// U+FFFD.
    ///
    /// # Errors
    /// [`Error::Usage`] for ids that the tokenizer refuses.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, true).map_err(|error| Error::Usage {
            asked: format!("the text of {} token ids", ids.len()),
            reason: error.to_string(),
            advice: "check the tokenizer of the model".to_owned(),
        })
    }

    /// One token to look at: its text, with bytes that are no whole character in hexadecimal, as `\u{27e8}e6 97\u{27e9}`. Nothing for special
    /// tokens and for ids without a token.
    pub fn label(&self, id: u32) -> String {
        let text = self.decode(&[id]).unwrap_or_default();
        if !text.contains(char::REPLACEMENT_CHARACTER) {
            return text;
        }
        // Only tokens of bytes are without a text; how they are written depends on the kind of tokenizer.
        let bytes = self.inner.id_to_token(id).and_then(|token| bytes_of(&token));
        bytes.map_or(text, |bytes| shown(&bytes))
    }
}

/// The bytes of a token of bytes: of one by its number, `<0xE6>`, or of several, each as the letter that byte-level BPE has for it.
fn bytes_of(token: &str) -> Option<Vec<u8>> {
    let number = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    if let Some(byte) = number.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        return Some(vec![byte]);
    }
    // Bytes that print are themselves; the others follow from U+0100 on, in their order.
    let prints = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others: Vec<u8> = (0..=u8::MAX).filter(|byte| !prints(byte)).collect();
    let byte = |letter: char| match u8::try_from(letter) {
        Ok(byte) => Some(byte).filter(prints),
        Err(_) => others.get((letter as usize).checked_sub(0x100)?).copied(),
    };
    token.chars().map(byte).collect()
}

/// Bytes as text, those that are no whole character in hexadecimal.
fn shown(bytes: &[u8]) -> String {
    let (mut text, mut broken) = (String::new(), Vec::new());
    let close = |text: &mut String, broken: &mut Vec<String>| {
        if !broken.is_empty() {
            *text += &format!("\u{27e8}{}\u{27e9}", broken.join("\u{a0}"));
            broken.clear();
        }
    };
    for chunk in bytes.utf8_chunks() {
        if !chunk.valid().is_empty() {
            close(&mut text, &mut broken);
            text += chunk.valid();
        }
        broken.extend(chunk.invalid().iter().map(|byte| format!("{byte:02x}")));
    }
    close(&mut text, &mut broken);
    text
}

fn wrong(file: &Gguf, error: &dyn std::fmt::Display) -> Error {
    file.refuse(format!("its tokenizer is wrong: {error}"))
}

fn needed(file: &mut Gguf, name: &str) -> Result<Vec<String>> {
    let strings = file.strings(name)?;
    strings.ok_or_else(|| file.refuse(format!("it has no field `{name}`")))
}

/// The token before every text, if the file wants one. Files of `llama-bpe` want it unless they say otherwise.
fn first_token(file: &Gguf, pre: &str) -> Result<Option<u32>> {
    let wanted = match file.field("tokenizer.ggml.add_bos_token") {
        Some(Field::Bool(wanted)) => *wanted,
        _ => pre == "llama-bpe",
    };
    if !wanted {
        return Ok(None);
    }
    let name = "tokenizer.ggml.bos_token_id";
    let id = match file.field(name) {
        Some(Field::Integer(id)) => u32::try_from(*id).ok(),
        _ => None,
    };
    let id = id.ok_or_else(|| file.refuse(format!("field `{name}` is missing or no token id")))?;
    Ok(Some(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tokenizer of these tokens with this decoder.
    fn tokenizer(tokens: &[&str], decoder: &str) -> Tokenizer {
        let vocab: serde_json::Map<_, _> = (0..)
            .zip(tokens)
            .map(|(id, token)| ((*token).to_owned(), serde_json::Value::from(id)))
            .collect();
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": serde_json::from_str::<serde_json::Value>(decoder).unwrap(),
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": tokens[0]}
        });
        Tokenizer {
            inner: json.to_string().parse().unwrap(),
            first: None,
        }
    }

    #[test]
    fn a_part_of_a_character_is_labelled_by_its_bytes() {
        // In the letters of byte-level BPE: a word; e6 97; a5; a space and e6; the whole of e6 97 a5; U+FFFD itself; a5, a and 97 a5.
        let letters = ["Ġcat", "æĹ", "¥", "Ġæ", "æĹ¥", "ï¿½", "¥aĹ¥"];
        let level =
            r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}"#;
        let level = tokenizer(&letters, level);
        let found: Vec<String> = (0..8).map(|id| level.label(id)).collect();
        assert_eq!(
            found,
            [
                " cat",
                "\u{27e8}e6\u{a0}97\u{27e9}",
                "\u{27e8}a5\u{27e9}",
                " \u{27e8}e6\u{27e9}",
                "\u{65e5}",
                "\u{fffd}",
                "\u{27e8}a5\u{27e9}a\u{27e8}97\u{a0}a5\u{27e9}",
                ""
            ]
        );
        let fallback = tokenizer(&["<0xE6>", "<0x41>", "\u{fffd}"], r#"{"type": "ByteFallback"}"#);
        let found: Vec<String> = (0..3).map(|id| fallback.label(id)).collect();
        assert_eq!(found, ["\u{27e8}e6\u{27e9}", "A", "\u{fffd}"]);
    }
}
