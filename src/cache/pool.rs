//! Pools: the pages of one class of layers and one side, who holds them, and in which buffers they lie.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::spec::buffer_pages;
use crate::error::{Error, Result};
use crate::pages::PageLayout;

/// The pages of one class and side: packed, or in full precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId {
    /// The class of layers.
    pub class: usize,
    /// K or V.
    pub side: usize,
    /// Pages in full precision rather than packed ones.
    pub waiting: bool,
}

/// The pages of a pool, each of which stands for one in every layer of its class.
#[derive(Debug)]
pub(super) struct Pool {
    pub layout: PageLayout,
    pub capacity: u32,
    pub per_buffer: u32,
    /// Pages below this have been used.
    pub fresh: u32,
    /// Used pages that are free, the lowest first: live pages then lie in few buffers.
    pub free: BinaryHeap<Reverse<u32>>,
    /// Sequences that hold each used page.
    pub holders: Vec<u32>,
}

impl Pool {
    /// A pool of `capacity` pages in buffers of at most `limit` bytes, each no larger than the share `step` of the pool.
    /// Without a limit it is one buffer.
    pub fn new(layout: PageLayout, capacity: u32, limit: Option<u64>, step: f64) -> Result<Pool> {
        let per_buffer = match limit {
            None => capacity,
            Some(limit) => {
                let allowed = buffer_pages(limit, &layout);
                if allowed == 0 {
                    return Err(Error::Limit {
                        what: format!("a page of `{}` (bytes of one binding)", layout.side),
                        needed: layout.bytes(),
                        allowed: limit,
                        advice: "use shorter pages".to_owned(),
                    });
                }
                // The cast saturates.
                let step = (f64::from(capacity) * step).ceil() as u64;
                allowed.min(step.clamp(1, u64::from(capacity))) as u32
            }
        };
        Ok(Pool {
            layout,
            capacity,
            per_buffer,
            fresh: 0,
            free: BinaryHeap::new(),
            holders: Vec::new(),
        })
    }

    /// Takes a page; beyond the capacity if need be, which the end of a plan looks at.
    pub fn take(&mut self) -> u32 {
        let page = match self.free.pop() {
            Some(Reverse(page)) => page,
            None => {
                self.fresh += 1;
                self.holders.push(0);
                self.fresh - 1
            }
        };
        self.holders[page as usize] = 1;
        page
    }

    pub fn hold(&mut self, page: u32) {
        self.holders[page as usize] += 1;
    }

    pub fn release(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        *holders -= 1;
        if *holders == 0 {
            self.free.push(Reverse(page));
        }
    }

    /// Forgets the last pages where nobody holds them: a plan that was taken back may have gone beyond the capacity.
    pub fn trim(&mut self) {
        while self.holders.pop_if(|holders| *holders == 0).is_some() {
            self.fresh -= 1;
        }
        self.free.retain(|&Reverse(page)| page < self.fresh);
    }

    /// The buffer of a page, and the page's number in it.
    pub fn locate(&self, page: u32) -> (u32, u32) {
        (page / self.per_buffer, page % self.per_buffer)
    }

    pub fn used(&self) -> u32 {
        self.fresh - self.free.len() as u32
    }

    pub fn unused(&self) -> u32 {
        self.capacity.saturating_sub(self.used())
    }
}

/// A pool as its user sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolState {
    /// Which pool.
    pub id: PoolId,
    /// The geometry of its pages.
    pub layout: PageLayout,
    /// Layers that have such a pool.
    pub layers: u32,
    /// Pages that sequences hold, in each of these layers. Shared pages count once.
    pub used: u32,
    /// Pages that the budget leaves free.
    pub free: u32,
    /// Pages of one buffer.
    pub per_buffer: u32,
    /// Pages that have been used so far, counted from 0.
    pub made: u32,
    /// Buffers that hold those.
    pub buffers: u32,
}

/// Pages in use by their parts, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct BytesInUse {
    /// Codes, of packed and of waiting tokens, unused slots too.
    pub codes: u64,
    /// Scales, unused slots too.
    pub scales: u64,
    /// Ends of head words and of planes.
    pub padding: u64,
}

impl BytesInUse {
    pub(super) fn add(&mut self, page: &PageLayout, pages: u64) {
        self.scales += pages * page.scale_bytes();
        self.padding += pages * page.padding_bytes();
        self.codes += pages * (page.bytes() - page.scale_bytes() - page.padding_bytes());
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.codes + self.scales + self.padding
    }
}
