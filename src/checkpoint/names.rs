//! What GGUF files call the tensors of a Llama.

/// The GGUF name of a tensor of the Hugging Face layout; other names stay as they are.
pub fn gguf(name: &str) -> String {
    match name {
        "model.embed_tokens.weight" => return "token_embd.weight".to_owned(),
        "model.norm.weight" => return "output_norm.weight".to_owned(),
        "lm_head.weight" => return "output.weight".to_owned(),
        _ => {}
    }
    let block = name
        .strip_prefix("model.layers.")
        .and_then(|rest| rest.split_once('.'));
    let Some((layer, rest)) = block else {
        return name.to_owned();
    };
    let part = match rest.strip_suffix(".weight") {
        Some("input_layernorm") => "attn_norm",
        Some("self_attn.q_proj") => "attn_q",
        Some("self_attn.k_proj") => "attn_k",
        Some("self_attn.v_proj") => "attn_v",
        Some("self_attn.o_proj") => "attn_output",
        Some("post_attention_layernorm") => "ffn_norm",
        Some("mlp.gate_proj") => "ffn_gate",
        Some("mlp.up_proj") => "ffn_up",
        Some("mlp.down_proj") => "ffn_down",
        _ => return name.to_owned(),
    };
    format!("blk.{layer}.{part}.weight")
}
