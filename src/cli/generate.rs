//! `kvpack generate`: text from a trained model, token by token.

use std::io::{IsTerminal, stderr};
use std::path::PathBuf;

use kvpack::checkpoint::Tokenizer;
use kvpack::generate::{GenerateOptions, Generated, generate};
use kvpack::spec::{Pair, Side};

use super::Failure;
use super::device::{AdapterArgs, Kind, window};
use super::model::WeightArgs;
use super::output::{print, tell};

/// What was asked.
#[derive(clap::Args)]
pub struct Args {
    /// The text to continue
    prompt: String,
    /// The model: a GGUF file or a Hugging Face folder, Llama architecture
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// How the cache stores keys and values, K/V or one name for both
    #[arg(long, value_name = "PAIR", default_value = "f16")]
    kv: Pair,
    /// Recent tokens that stay in f16
    #[arg(long, value_name = "R", default_value = "0", value_parser = window, allow_hyphen_values = true)]
    window: u32,
    /// The most new tokens
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 takes the most probable token; above, tokens are drawn
    #[arg(long, value_name = "T", default_value = "0", value_parser = temperature, allow_hyphen_values = true)]
    temperature: f64,
    /// Where drawing begins: the same seed draws the same tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Also run the f32 cache, and show where its text first differs
    #[arg(long)]
    compare: bool,
    /// Print tokens per second and the cache's bytes
    #[arg(long)]
    stats: bool,
    #[command(flatten)]
    weights: WeightArgs,
    /// Where to run
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    device: Kind,
    #[command(flatten)]
    adapter: AdapterArgs,
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("must be a finite number, 0 or more".to_owned()),
    }
}

impl Args {
    /// Loads, then writes the text as it comes.
    pub fn run(self) -> Result<(), Failure> {
        let (device, remark) = self.adapter.device(self.device)?;
        if let Some(remark) = remark {
            tell(&remark);
        }
        let loaded = self.weights.load(&self.model, &device, true)?;
        let Some(tokenizer) = &loaded.tokenizer else {
            return Ok(());
        };
        let prompt = tokenizer.encode(&self.prompt)?;
        let options = GenerateOptions {
            pair: self.kv,
            window: self.window,
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            seed: self.seed,
            kv_scales: loaded.kv_scales.clone(),
            end_of_text: loaded.end_of_text.clone(),
        };
        print(&self.prompt)?;
        let mut stream = Stream::new(tokenizer);
        let mut failed = None;
        let generated = generate(&loaded.model, &prompt, &options, &mut |id| {
            failed = stream.push(id)?.and_then(|text| print(&text).err());
            Ok(failed.is_none())
        })?;
        if let Some(failure) = failed {
            return Err(failure);
        }
        print(&(stream.rest()? + "\n"))?;
        if self.stats {
            tell(&stats(&self.kv.to_string(), prompt.len(), &generated));
        }
        if !self.compare {
            return Ok(());
        }
        if stderr().is_terminal() {
            tell("running the f32 cache ...");
        }
        let f32 = GenerateOptions {
            pair: Pair::same(Side::F32),
            ..options
        };
        let reference = generate(&loaded.model, &prompt, &f32, &mut |_| Ok(true))?;
        if self.stats {
            tell(&stats("f32", prompt.len(), &reference));
        }
        print(&comparison(
            tokenizer,
            &self.kv.to_string(),
            &generated,
            &reference,
        )?)
    }
}

/// Text of tokens as it becomes complete: a letter may take several tokens.
struct Stream<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    /// Text that was given out, and the tokens that it is of.
    shown: String,
}

impl Stream<'_> {
    fn new(tokenizer: &Tokenizer) -> Stream<'_> {
        Stream {
            tokenizer,
            ids: Vec::new(),
            shown: String::new(),
        }
    }

    /// What can be shown after one more token.
    fn push(&mut self, id: u32) -> kvpack::Result<Option<String>> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        // An unfinished letter decodes as the replacement character.
        if text.ends_with('\u{fffd}') {
            return Ok(None);
        }
        Ok(Some(self.take(text)))
    }

    fn rest(&mut self) -> kvpack::Result<String> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(self.take(text))
    }

    fn take(&mut self, text: String) -> String {
        let new = text
            .strip_prefix(&self.shown)
            .map_or_else(String::new, str::to_owned);
        self.shown = text;
        new
    }
}

fn stats(pair: &str, prompt: usize, generated: &Generated) -> String {
    let rate = |tokens: usize, seconds: f64| match tokens {
        0 => "none".to_owned(),
        _ => format!("{tokens} tokens, {:.2} tokens/s", tokens as f64 / seconds),
    };
    // The first new token comes from the prompt.
    let decoded = generated.cached_tokens as usize - prompt;
    format!(
        "{pair}: prompt {}; decode {}; cache {} bytes for {} tokens",
        rate(prompt, generated.prompt_seconds),
        rate(decoded, generated.decode_seconds),
        generated.cache_bytes,
        generated.cached_tokens
    )
}

/// Where the texts part.
fn comparison(
    tokenizer: &Tokenizer,
    pair: &str,
    generated: &Generated,
    reference: &Generated,
) -> Result<String, Failure> {
    let (ours, theirs) = (&generated.ids, &reference.ids);
    let same = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
    if same == ours.len() && same == theirs.len() {
        return Ok(format!("\n{pair} and f32: the same {same} tokens.\n"));
    }
    // Differing tokens with a few after them.
    let from = |ids: &[u32]| -> kvpack::Result<String> {
        match ids.get(same..) {
            Some([]) | None => Ok("(the end)".to_owned()),
            Some(rest) => Ok(format!("{:?}", tokenizer.decode(&rest[..rest.len().min(12)])?)),
        }
    };
    let common = tokenizer.decode(&ours[..same])?;
    let tail: String = common
        .chars()
        .skip(common.chars().count().saturating_sub(40))
        .collect();
    Ok(format!(
        "\n{pair} and f32: the same {same} tokens, then, after {tail:?}:\n  {pair}: {}\n  f32: {}\n",
        from(ours)?,
        from(theirs)?
    ))
}
