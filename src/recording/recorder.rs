//! The recorder: watches the runs of a measurement and keeps what is shown of them.

use super::logits::flip;
use super::{NEVER, RecordedPrompt, RecordedRun, Shown, StoredSide};
use crate::cache::{CacheSpec, K, TensorScales, V};
use crate::drift::shadow::{NewRows, Shadow};
use crate::drift::{Done, Seen, Watch};
use crate::error::Result;
use crate::model::Placed;

/// Keeps what is shown of a measurement's runs.
#[derive(Debug)]
pub struct Recorder<'m> {
    model: &'m Placed,
    shown: Shown,
    runs: Vec<RecordedRun>,
    /// Rows of K and V of the prompt at hand, by shown layer, all heads and tokens.
    rows: Vec<[Vec<f32>; 2]>,
}

impl<'m> Recorder<'m> {
    /// A recorder for runs of a model.
    pub fn new(model: &'m Placed, shown: Shown) -> Recorder<'m> {
        Recorder {
            model,
            shown,
            runs: Vec::new(),
            rows: Vec::new(),
        }
    }

    /// The runs: that with the f32 cache, then one a pair.
    pub fn into_runs(self) -> Vec<RecordedRun> {
        self.runs
    }

    fn tokens(&self, prompt: usize) -> &[u32] {
        self.shown.tokens.get(prompt).map_or(&[], Vec::as_slice)
    }

    /// What the caches hold of the prompt at hand.
    fn stored(&self, done: &Done<'_, '_>) -> Result<Vec<[StoredSide; 2]>> {
        let book = done.session.book();
        let (heads, tokens) = (&self.shown.heads, self.tokens(done.prompt));
        let scales = tensor_scales(book.spec());
        let mut layers = Vec::new();
        for (&layer, rows) in self.shown.layers.iter().zip(&self.rows) {
            let class = book.geometry().class(layer)?;
            let mut sides = [K, V].map(|s| {
                let waits = class.waiting[s].filter(|_| class.waits[s]);
                StoredSide::new(class.packed[s], waits, &rows[s], heads, tokens)
            });
            for (s, side) in sides.iter_mut().enumerate() {
                let pages = done.session.pages(done.sequence, layer, s)?;
                let scale = scales.get(layer as usize).map_or(1.0, |pair| pair[s]);
                side.take_packed(&pages, heads, tokens, scale);
                if side.waits.is_none() {
                    let at = tokens.iter().map(|token| token + 1);
                    side.packed_at = at.collect();
                }
            }
            layers.push(sides);
        }
        if layers.iter().flatten().any(|side| side.waits.is_some()) {
            let (spec, pages) = (book.spec().clone(), book.pages());
            self.replay(spec, pages, book.len(done.sequence)?, tokens, &mut layers)?;
        }
        Ok(layers)
    }

    /// Appends the rows to a cache of the same kind, of the shown layers, step by step, and looks at what waits before each group closes.
    fn replay(
        &self,
        spec: CacheSpec,
        pages: u32,
        len: u32,
        tokens: &[u32],
        layers: &mut [[StoredSide; 2]],
    ) -> Result<()> {
        let mut shadow = Shadow::new(self.model, of_layers(spec, pages, &self.shown.layers)?)?;
        let mut at = 0;
        // Boundaries of K and V, which are the same in every layer.
        let mut packed = [0; 2];
        while at < len {
            let class = shadow.book().geometry().class(0)?.clone();
            let after = |len: u32| [K, V].map(|s| class.boundary(s, packed[s], len));
            let moves = |len: u32| {
                let then = after(len);
                [K, V].iter().any(|&s| class.waits[s] && then[s] != packed[s])
            };
            // Up to the step that closes a group, then that step.
            let quiet = (at + 1..=len).take_while(|&len| !moves(len)).count() as u32;
            let new = quiet.max(1);
            let [first, last] = [at, at + new].map(|token| token as usize);
            let new_rows: Vec<_> = (0..)
                .zip(&self.rows)
                .map(|(layer, rows)| {
                    let part = |s: usize| {
                        let row = (class.packed[s].heads * class.packed[s].head_dim) as usize;
                        &rows[s][first * row..last * row]
                    };
                    NewRows {
                        layer,
                        k: part(K),
                        v: part(V),
                    }
                })
                .collect();
            shadow.append(new, &new_rows)?;
            at += new;
            let boundaries = after(at);
            for (sides, layer) in layers.iter_mut().zip(0..) {
                for (s, side) in sides
                    .iter_mut()
                    .enumerate()
                    .filter(|(_, side)| side.waits.is_some())
                {
                    for (token, packed_at) in tokens.iter().zip(&mut side.packed_at) {
                        if *packed_at == NEVER && *token < boundaries[s] {
                            *packed_at = at;
                        }
                    }
                    let waits = |token: &&u32| (boundaries[s]..at).contains(*token);
                    if tokens.iter().any(|token| waits(&token)) {
                        side.take_waiting(&shadow.pages(layer, s)?, &self.shown.heads, tokens);
                    }
                }
            }
            packed = boundaries;
        }
        Ok(())
    }
}

/// The spec of a cache that has only some of the layers, which are all stored alike.
fn of_layers(spec: CacheSpec, pages: u32, layers: &[u32]) -> Result<CacheSpec> {
    let tensor_scales = match spec.tensor_scales {
        TensorScales::Given(scales) => TensorScales::Given(
            layers
                .iter()
                .filter_map(|&layer| scales.get(layer as usize).copied())
                .collect(),
        ),
        TensorScales::FromRows => TensorScales::FromRows,
    };
    CacheSpec {
        layers: spec.layers.into_iter().take(layers.len()).collect(),
        tensor_scales,
        ..spec
    }
    .with_pages(pages)
}

fn tensor_scales(spec: &CacheSpec) -> Vec<[f32; 2]> {
    match &spec.tensor_scales {
        TensorScales::Given(scales) => scales.clone(),
        TensorScales::FromRows => Vec::new(),
    }
}

impl Watch for Recorder<'_> {
    fn seen(&mut self, seen: &Seen<'_>) -> Result<()> {
        if seen.first_position == 0 {
            if seen.prompt == 0 {
                self.runs.push(RecordedRun {
                    pair: seen.pair,
                    tensor_scales: Vec::new(),
                    prompts: Vec::new(),
                });
            }
            self.rows = vec![Default::default(); self.shown.layers.len()];
            if let Some(run) = self.runs.last_mut() {
                run.prompts.push(RecordedPrompt::default());
            }
        }
        for (kept, &layer) in self.rows.iter_mut().zip(&self.shown.layers) {
            for rows in seen.layers.iter().filter(|rows| rows.layer == layer) {
                kept[K].extend(&rows.k);
                kept[V].extend(&rows.v);
            }
        }
        let shown = self.shown.tokens.get(seen.prompt).map_or(&[][..], Vec::as_slice);
        let Some(prompt) = self.runs.last_mut().and_then(|run| run.prompts.last_mut()) else {
            return Ok(());
        };
        let vocabulary = self.model.config().vocabulary.max(1) as usize;
        let rows = seen
            .reference
            .chunks(vocabulary)
            .zip(seen.logits.chunks(vocabulary));
        for (position, (r, q)) in (seen.first_position..).zip(rows) {
            prompt
                .error
                .push(r.iter().zip(q).map(|(r, q)| (r - q).powi(2)).sum());
            prompt.power.push(r.iter().map(|r| r.powi(2)).sum());
            prompt.flips.extend(flip(position, r, q));
            if shown.binary_search(&position).is_ok() {
                prompt.predictions.add(r, q);
            }
        }
        Ok(())
    }

    fn done(&mut self, done: &Done<'_, '_>) -> Result<()> {
        if done.pair.is_none() {
            return Ok(());
        }
        let layers = self.stored(done)?;
        if let Some(run) = self.runs.last_mut() {
            run.tensor_scales = tensor_scales(done.session.book().spec());
            if let Some(prompt) = run.prompts.last_mut() {
                prompt.layers = layers;
            }
        }
        Ok(())
    }
}
