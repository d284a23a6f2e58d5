//! The page of a report in headless Chromium: every control, both themes, three widths, hostile and long texts; and the numbers
//! that it shows against the CPU reference. `tools/browser/report.mjs` does the looking.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use kvpack::scales::ScaleLayout;
use serde_json::Value;

use crate::common;
use crate::report_data::{data_of, expected, f32s, kvpack_bench, report, spec_of, tiny_options};

/// A check of a page: exit code and output.
fn check_with(what: &str, page: &Path) -> (i32, String, String) {
    let run = Command::new("node")
        .arg(common::path("tools/browser/report.mjs"))
        .arg(what)
        .arg(page)
        .output()
        .unwrap_or_else(|e| panic!("node cannot be started ({e}). Run: apt-get install -y nodejs npm"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        run.status.code().unwrap_or(-1),
        text(&run.stdout),
        text(&run.stderr),
    )
}

/// A check that must find no fault: what it printed.
fn check(what: &str, page: &Path) -> String {
    let (code, output, faults) = check_with(what, page);
    assert_eq!(code, 0, "{what}: {faults}");
    output
}

/// The page of the tiny model on the CPU reference with a benchmark, made once.
fn tiny_page() -> &'static Path {
    static PAGE: OnceLock<PathBuf> = OnceLock::new();
    PAGE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("bench.json"), kvpack_bench()).unwrap();
        let output = report(
            &folder,
            &["--device", "cpu", "--bench", "bench.json", "--out", "tiny.html"],
        );
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        folder.join("tiny.html")
    })
}

#[test]
fn three_widths_in_both_themes_have_no_fault() {
    check("looks", tiny_page());
}

#[test]
fn it_plays_to_the_end_and_pauses() {
    check("plays", tiny_page());
}

#[test]
fn every_control_works_by_pointer() {
    check("mouse", tiny_page());
}

#[test]
fn every_control_works_by_keyboard() {
    check("keys", tiny_page());
}

/// Changes the page without its policy, which would refuse a changed script or style.
fn spoilt(name: &str, from: &str, to: &str) -> PathBuf {
    let page = fs::read_to_string(tiny_page()).unwrap();
    assert!(page.contains(from), "{from}");
    let policy = page.find("<meta http-equiv").unwrap();
    let end = policy + page[policy..].find('>').unwrap();
    let page = page[..policy].to_owned() + &page[end + 1..];
    let file = tiny_page().with_file_name(name);
    fs::write(&file, page.replacen(from, to, 1)).unwrap();
    file
}

#[test]
fn the_checks_can_fail() {
    for (what, from, to, words) in [
        ("glance", "--soft: #565d69", "--soft: #b0b0b0", "contrast"),
        (
            "glance",
            "overflow-x: auto; border-block",
            "border-block",
            "wide in a window",
        ),
        (
            "glance",
            "<label>Layer <select",
            "<label><select aria-label='' ",
            "axe: ",
        ),
        (
            "glance",
            "h2 { font-size: clamp",
            "h2 { margin-bottom: -2rem !important; font-size: clamp",
            "covers",
        ),
        (
            "plays",
            "go(state.step + 1);\n    if",
            "go(state.step + (state.step < 9 ? 1 : 0));\n    if",
            "it stopped at 9",
        ),
        (
            "mouse",
            "id: 'factor', min",
            "id: 'factor', disabled: true, min",
            "factor",
        ),
        (
            "mouse",
            "`${above + (cell - 12) / 2}px`",
            "`${(cell - 12) / 2}px`",
            "K as read back from the cache: beside 0 stands",
        ),
        (
            "mouse",
            "` changed-${second ? 'b' : 'a'}`",
            "` changed-a`",
            "lines under tokens",
        ),
        (
            "keys",
            "class: `point${side}`, tabindex: 0",
            "class: `point${side}`, tabindex: -1",
            "controls are reached",
        ),
        (
            "inert",
            "node.textContent = value",
            "node.innerHTML = `<b>${value}</b>`",
            "elements came from texts",
        ),
    ] {
        let page = spoilt("spoilt.html", from, to);
        let (code, _, faults) = check_with(what, &page);
        assert!(
            code == 1 && faults.contains(words),
            "{what} {from}: {code} {faults}"
        );
    }
    // A changed script does not run at all under the policy.
    let page = fs::read_to_string(tiny_page()).unwrap();
    let file = tiny_page().with_file_name("changed.html");
    fs::write(&file, page.replacen("measuredFacts();\n", "measuredFacts(); ", 1)).unwrap();
    let (code, ..) = check_with("inert", &file);
    assert_eq!(code, 1);
}

#[test]
fn shown_numbers_are_those_of_the_reference() {
    compare_numbers(tiny_page());
    // A scale in another word than the page's is found.
    let page = spoilt(
        "scales.html",
        "kind.scale_offset + Math.floor",
        "kind.scale_offset + 1 + Math.floor",
    );
    assert!(std::panic::catch_unwind(|| compare_numbers(&page)).is_err());
}

/// Compares what a page shows of a sample of numbers, bit for bit, with the reference on the rows that it holds.
fn compare_numbers(page: &Path) {
    let data = data_of(&fs::read_to_string(page).unwrap());
    let sample: Value = serde_json::from_str(&check("numbers", page)).unwrap();
    let found = sample["found"].as_array().unwrap();
    // 3 factors, 8 pairs, 4 prompts, 2 layers, 2 heads, 2 sides, 8 channels of a token each.
    assert_eq!(found.len(), 3 * 8 * 4 * 2 * 2 * 2 * 8);
    let options = tiny_options();
    let number = |value: &Value| value.as_u64().unwrap();
    let bits = |value: &Value| f64::from_bits(value.as_str().unwrap().parse().unwrap());
    let (mut scales, mut words) = (0, 0);
    for at in found.chunks(8) {
        let first = &at[0];
        let takes = data["recordings"][0]["takes"].as_array().unwrap();
        let take = takes
            .iter()
            .find(|take| take["outlier"].as_f64() == first["outlier"].as_f64())
            .unwrap();
        let run = take["runs"]
            .as_array()
            .unwrap()
            .iter()
            .find(|run| run["pair"] == first["pair"])
            .unwrap();
        let [prompt, layer, head, token] =
            ["prompt", "layer", "head", "token"].map(|field| number(&first[field]) as usize);
        let sides = &run["prompts"][prompt]["layers"][layer];
        let rows = ["k", "v"].map(|side| f32s(&data, &sides[side]["rows"]));
        let pair = first["pair"].as_str().unwrap().parse().unwrap();
        let side = usize::from(first["side"] == "v");
        let expected = &expected(&spec_of(&options, pair, run), layer as u32, [&rows[0], &rows[1]])[side];
        for (channel, shown) in at.iter().enumerate() {
            let place = (token * 2 + head) * 8 + channel;
            let (read, computed) = (f64::from(expected.read[place]), f64::from(rows[side][place]));
            assert_eq!(number(&shown["channel"]) as usize, channel);
            assert_eq!(bits(&shown["read"]).to_bits(), read.to_bits(), "{shown}");
            assert_eq!(
                bits(&shown["error"]).to_bits(),
                (read - computed).to_bits(),
                "{shown}"
            );
            assert_eq!(shown["shown"], true, "{shown}");
            // The word of the page in which its scale is shown, and the framed bits.
            match (
                shown["packed"].as_bool().unwrap(),
                expected
                    .layout
                    .scale_at(token as u32, head as u32, channel as u32),
            ) {
                (true, Some((word, bit))) => {
                    let scale = (expected.packed_page[word as usize] >> bit)
                        & (u32::MAX >> (32 - expected.layout.side.scale.bits()));
                    assert_eq!(shown["scale"], serde_json::json!([word, bit, scale]), "{shown}");
                    scales += 1;
                }
                _ => assert!(shown["scale"].is_null(), "{shown}"),
            }
        }
        // The scale of a tensor stands beside the pages.
        let tensor = &run["tensor_scales"][layer][side];
        let tensor = tensor
            .as_f64()
            .map(|scale| format!("0x{:08x}", (scale as f32).to_bits()));
        let shows = expected.layout.side.layout == ScaleLayout::PerTensor;
        assert_eq!(
            first["tensor"].as_str(),
            tensor.as_deref().filter(|_| shows),
            "{first}"
        );
        // Whole words too, where all of their scales are known.
        for word in first["scale_words"].as_array().unwrap() {
            let place = number(&word[0]) as usize;
            assert_eq!(
                word[1],
                format!("0x{:08x}", expected.packed_page[place]),
                "{first}"
            );
            words += 1;
        }
    }
    // 4 pairs of 8 have scales in their pages; some rows wait.
    assert!(
        scales > 1000 && words > 200,
        "{scales} scales, {words} whole words"
    );
}

#[test]
fn what_a_layman_asks_is_said() {
    let found: Value = serde_json::from_str(&check("inert", tiny_page())).unwrap();
    let text = found["text"].as_str().unwrap();
    for words in [
        "The tiny model has random weights: its guesses mean nothing as text.",
        "Layer, head, channel",
        "Prefill, decode",
        "Largest difference",
        "1 nat is",
        "llvmpipe",
        "f32 and f16: ",
        "fp8: ",
        "fp4: ",
        "int8, int4 and int2: ",
    ] {
        assert!(text.contains(words), "{words}");
    }
    assert_eq!(found["shown"]["meaning"], true);
    let short = found["short"].as_str().unwrap();
    let share = short
        .split("at least 98 in 100 predictions as they were (")
        .nth(1)
        .and_then(|rest| rest.split(" of 128)").next());
    assert!(
        share.is_some_and(|kept| (126..=128).contains(&kept.parse::<u32>().unwrap())),
        "{short}"
    );
    // No line breaks between a number and its sign.
    for at in text.match_indices(" %") {
        let before = text[..at.0].chars().next_back();
        assert!(
            !before.is_some_and(|letter| letter.is_ascii_digit()),
            "{:?}",
            &text[at.0 - 8..at.0 + 2]
        );
    }
}

// ---- texts -----------------------------------------------------------------------------------------------------------

/// Words that mean something to a parser, or that show nothing.
const HOSTILE: [&str; 15] = [
    "</script><script>globalThis.hacked=1</script>",
    "<img src=x onerror=\"globalThis.hacked=1\">",
    "<!--",
    "]]>",
    "\"quoted\" 'and' `so`",
    "&lt;b&gt;",
    "\\u003cb>",
    "{{script}}",
    "\u{0}\u{1}\u{7f}",
    "\u{2028}\u{2029}",
    "\u{202e}turned\u{202c}",
    "\u{feff}\u{200b}",
    "${globalThis.hacked=1}",
    "line\nfeed\ttab\r",
    PART,
];
/// A token that is a part of a character: the byte e6.
const PART: &str = "<0xE6>";

/// A Hugging Face folder of a model whose vocabulary is the letters a to h and the hostile words: 4 layers, 4 query heads over
/// 2 KV heads of 16, 2048 positions.
fn write_model(folder: &Path) {
    let vocabulary = 8 + HOSTILE.len() as u64;
    let mut shapes = vec![
        ("model.embed_tokens".to_owned(), vec![vocabulary, 32]),
        ("model.norm".to_owned(), vec![32]),
    ];
    for layer in 0..4 {
        for (part, shape) in [
            ("input_layernorm", vec![32]),
            ("self_attn.q_proj", vec![64, 32]),
            ("self_attn.k_proj", vec![32, 32]),
            ("self_attn.v_proj", vec![32, 32]),
            ("self_attn.o_proj", vec![32, 64]),
            ("post_attention_layernorm", vec![32]),
            ("mlp.gate_proj", vec![48, 32]),
            ("mlp.up_proj", vec![48, 32]),
            ("mlp.down_proj", vec![32, 48]),
        ] {
            shapes.push((format!("model.layers.{layer}.{part}"), shape));
        }
    }
    let (mut header, mut bytes) = (Vec::new(), Vec::new());
    let mut state = 7_u32;
    for (name, shape) in shapes {
        let begin = bytes.len();
        for _ in 0..shape.iter().product() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bytes.extend(((state >> 8) as f32 / (1 << 23) as f32 - 1.0).to_le_bytes());
        }
        let end = bytes.len();
        header.push(format!(
            r#""{name}.weight":{{"dtype":"F32","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#
        ));
    }
    let header = format!("{{{}}}", header.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(bytes);
    fs::write(folder.join("model.safetensors"), file).unwrap();
    let config = format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": {vocabulary}, "hidden_size": 32, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "intermediate_size": 48,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "hidden_act": "silu", "eos_token_id": 7}}"#
    );
    fs::write(folder.join("config.json"), config).unwrap();
    let letters = ('a'..='h').map(String::from);
    let words: Vec<String> = letters.chain(HOSTILE.map(str::to_owned)).collect();
    let vocab: serde_json::Map<String, Value> = (0..)
        .zip(&words)
        .map(|(id, word)| (word.clone(), Value::from(id)))
        .collect();
    let added: Vec<Value> = (8..)
        .zip(HOSTILE)
        .map(|(id, word)| {
            serde_json::json!({"id": id, "content": word, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": false})
        })
        .collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": {"type": "ByteFallback"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

/// The page of a text through that model.
fn page_of(folder: &Path, text: &str) -> (std::process::Output, PathBuf) {
    if !folder.join("config.json").exists() {
        write_model(folder);
    }
    fs::write(folder.join("text.txt"), text).unwrap();
    // The CPU reference takes its time with long texts.
    let pairs = match text.len() < 1000 {
        true => "f16,int4,int4c(8)/int4,int2",
        false => "int4,int4c(8)/int4",
    };
    let output = report(
        folder,
        &[
            "--device",
            "cpu",
            "--model",
            ".",
            "--text",
            "text.txt",
            "--pairs",
            pairs,
            "--out",
            "page.html",
        ],
    );
    (output, folder.join("page.html"))
}

fn made(folder: &Path, text: &str) -> PathBuf {
    let (output, page) = page_of(folder, text);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    page
}

#[test]
fn a_text_of_markup_quotes_and_control_characters_is_inert_and_shown() {
    let folder = tempfile::tempdir().unwrap();
    let page = made(folder.path(), &format!("a {} b", HOSTILE.join(" c ")));
    let text = fs::read_to_string(&page).unwrap();
    assert_eq!(text.matches("</script>").count(), 2);
    assert!(!text.contains("<img") && !text.contains('\u{2028}') && !text.contains('\u{0}'));
    let data = data_of(&text);
    for word in HOSTILE {
        let texts = data["recordings"][0]["texts"].as_object().unwrap();
        let word = if word == PART { "\u{27e8}e6\u{27e9}" } else { word };
        assert!(texts.values().any(|text| text == word), "{word:?}");
    }
    let found: Value = serde_json::from_str(&check("inert", &page)).unwrap();
    let tokens: Vec<&str> = found["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| token.as_str().unwrap())
        .collect();
    for shown in [
        "</script><script>globalThis.hacked=1</script>",
        "\u{2400}\u{2401}\u{2421}",
        "U+2028U+2029",
        "U+202EturnedU+202C",
        "U+FEFFU+200B",
        "line\u{23ce}feed\u{21e5}tab\u{240d}",
        "&lt;b&gt;",
        "\u{27e8}e6\u{27e9}",
    ] {
        assert!(tokens.contains(&shown), "{shown:?} is not in {tokens:?}");
    }
    assert_eq!(found["shown"]["meaning"], false);
    check("looks", &page);
}

#[test]
fn a_text_of_one_token_is_a_page_and_an_empty_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let page = made(folder.path(), "a");
    let data = data_of(&fs::read_to_string(&page).unwrap());
    assert!(data["table"][1]["perplexity"].is_null());
    assert_eq!(data["table"][1]["predictions"], 1);
    let found: Value = serde_json::from_str(&check("inert", &page)).unwrap();
    assert_eq!(found["tokens"], serde_json::json!(["a"]));
    assert!(found["text"].as_str().unwrap().contains("token 1 of 1"));
    fs::remove_file(&page).unwrap();
    for text in ["", " \n "] {
        let (output, page) = page_of(folder.path(), text);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains("a text of 0 tokens"), "{message}");
        assert!(!page.exists());
    }
}

#[test]
fn two_thousand_tokens_are_sampled_which_is_said_and_the_page_stays_quick() {
    let folder = tempfile::tempdir().unwrap();
    let words: Vec<String> = (0..2000_u32)
        .map(|i| char::from(b'a' + (i * i % 8) as u8).to_string())
        .collect();
    let page = made(folder.path(), &words.join(" "));
    let text = fs::read_to_string(&page).unwrap();
    assert!(text.len() < 6_000_000, "{}", text.len());
    let data = data_of(&text);
    let recording = &data["recordings"][0];
    assert_eq!(recording["prompts"][0]["ids"].as_array().unwrap().len(), 2000);
    let shown = recording["prompts"][0]["shown"].as_array().unwrap().len();
    assert!((16..=128).contains(&shown), "{shown}");
    let found: Value = serde_json::from_str(&check("inert", &page)).unwrap();
    assert_eq!(found["tokens"].as_array().unwrap().len(), shown);
    let sampled = found["sampled"].as_str().unwrap();
    assert!(
        sampled.contains("Of 2,000 tokens the first") && sampled.contains("are shown"),
        "{sampled}"
    );
    let times: Value = serde_json::from_str(&check("quick", &page)).unwrap();
    // On a machine that does other work too; 20 ms on one that does not.
    assert!(
        times["step"].as_f64().unwrap() < 250.0 && times["open"].as_f64().unwrap() < 8000.0,
        "{times}"
    );
    check("looks", &page);
    check("keys", &page);
}
