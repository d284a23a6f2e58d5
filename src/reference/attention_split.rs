use crate::options::AttentionOptions;
use crate::pages::PageLayout;
use crate::rope::RopeTable;
use crate::work::{TableEntry, WorkItem};

/// What attention knows besides its work lists.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape<'a> {
    /// Geometry of K pages.
    pub k: PageLayout,
    /// Geometry of V pages.
    pub v: PageLayout,
    /// Query heads; query head h reads KV head h / (q_heads / kv_heads).
    pub q_heads: u32,
    /// Mask, soft cap, scale. Sinks are the merge's business.
    pub options: AttentionOptions<&'a [f32]>,
    /// Per-tensor scale of K, where there is one.
    pub k_tensor_scale: f32,
    /// Per-tensor scale of V, where there is one.
    pub v_tensor_scale: f32,
    /// For keys that are stored before RoPE: their turns.
    pub key_rotation: Option<&'a RopeTable>,
}

/// Partials of attention: `[partial]` largest score and sum of exp(score - largest), `[partial][channel]` weighted sum.
#[derive(Debug, Clone, Default)]
pub struct Partials {
    /// Largest score; without meaning where `l` is 0.
    pub m: Vec<f64>,
    /// Sum of exp(score - m); 0 for an empty partial.
    pub l: Vec<f64>,
    /// Sum of exp(score - m) x value.
    pub o: Vec<f64>,
}

impl Partials {
    /// Room for `count` partials of `v_head_dim` channels, all empty.
    pub fn new(count: usize, v_head_dim: u32) -> Partials {
        Partials {
            m: vec![-f64::MAX; count],
            l: vec![0.0; count],
            o: vec![0.0; count * v_head_dim as usize],
        }
    }
}

/// Attention of each work item over its pages, straight from the packed words. `q` is `[token][query head][channel]`.
pub fn attention_split(
    shape: &AttentionShape<'_>,
    items: &[WorkItem],
    table: &[TableEntry],
    q: &[f64],
    k_pages: &[u32],
    v_pages: &[u32],
    partials: &mut Partials,
) {
    let (k_dim, v_dim) = (shape.k.head_dim, shape.v.head_dim);
    let ratio = shape.q_heads / shape.k.heads;
    let (options, scale) = (&shape.options, shape.options.score_scale(k_dim));
    for item in items {
        for token in 0..item.queries {
            for q_head in 0..shape.q_heads {
                let head = q_head / ratio;
                let row = ((item.query + token) * shape.q_heads + q_head) as usize * k_dim as usize;
                let mut seen = Vec::new();
                for i in 0..item.pages {
                    let entry = &table[(item.table + i) as usize];
                    let k_page = &k_pages[shape.k.range(entry.k_page)];
                    for slot in entry.first..entry.last {
                        let position = u64::from(item.position + i * shape.k.tokens + slot);
                        let query = u64::from(item.query_position + token);
                        let later = options.causal && position > query;
                        if later || options.window.is_some_and(|w| position + u64::from(w) <= query) {
                            continue;
                        }
                        let stored =
                            |c| f64::from(shape.k.number(k_page, slot, head, c, shape.k_tensor_scale));
                        let k = |c| match shape.key_rotation {
                            None => stored(c),
                            Some(table) => table.turned(position as u32, c, stored),
                        };
                        let dot: f64 = (0..k_dim).map(|c| q[row + c as usize] * k(c)).sum();
                        let score = dot * scale;
                        let capped = |cap: f32| f64::from(cap) * (score / f64::from(cap)).tanh();
                        seen.push((entry, slot, options.softcap.map_or(score, capped)));
                    }
                }
                let partial = (item.partial + token * shape.q_heads + q_head) as usize;
                let m = seen.iter().fold(-f64::MAX, |m, s| m.max(s.2));
                partials.m[partial] = m;
                for (entry, slot, score) in seen {
                    let p = (score - m).exp();
                    partials.l[partial] += p;
                    let v_page = &v_pages[shape.v.range(entry.v_page)];
                    for c in 0..v_dim {
                        let v = shape.v.number(v_page, slot, head, c, shape.v_tensor_scale);
                        partials.o[partial * v_dim as usize + c as usize] += p * f64::from(v);
                    }
                }
            }
        }
    }
}
