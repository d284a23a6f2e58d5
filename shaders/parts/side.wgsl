// The geometry of one side's pages. Written once with names that begin with side_; the composer makes the copies for
// K (k_) and V (v_). A page is a code plane, word w of slot t at w * SIDE_PAGE_TOKENS + t, then a plane of scales.
const SIDE_BITS: u32 = 4u; // of a code
const SIDE_HEADS: u32 = 8u; // KV heads
const SIDE_HEAD_DIM: u32 = 64u; // channels of a head
const SIDE_HEAD_WORDS: u32 = 8u; // words of a head of one token
const SIDE_PAGE_TOKENS: u32 = 64u; // slots
const SIDE_PAGE_WORDS: u32 = 4352u; // words of a whole page
const SIDE_SCALE_OFFSET: u32 = 4096u; // word at which the scales begin
const SIDE_SCALE_BITS: u32 = 16u; // of a stored scale
const SIDE_GROUP: u32 = 1u; // tokens that share a per-channel scale
const_assert SIDE_HEAD_DIM % 8u == 0u;
const_assert SIDE_PAGE_TOKENS % 8u == 0u;
const_assert SIDE_PAGE_TOKENS % SIDE_GROUP == 0u;
const_assert SIDE_PAGE_WORDS % 4u == 0u;
