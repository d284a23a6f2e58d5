//! The element types of GGUF tensors and how their blocks become f32. Layouts are those of the ggml library.

use half::{bf16, f16};

/// How a tensor's numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockType {
    /// binary32.
    F32,
    /// binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
    /// 32 numbers: f16 scale d, 4-bit codes; (code - 8) d.
    Q4_0,
    /// 32 numbers: f16 scale d and minimum m, 4-bit codes; code d + m.
    Q4_1,
    /// 32 numbers: f16 scale d, 5-bit codes whose top bits lie in a word of their own; (code - 16) d.
    Q5_0,
    /// 32 numbers: f16 scale d and minimum m, 5-bit codes; code d + m.
    Q5_1,
    /// 32 numbers: f16 scale d, 8-bit codes; code d.
    Q8_0,
    /// 256 numbers in 8 groups of 32: f16 d and dmin, 6-bit scale and minimum of each group, 4-bit codes.
    Q4K,
    /// 256 numbers in 16 groups of 16: f16 d, 8-bit scale of each group, 6-bit codes; (code - 32) scale d.
    Q6K,
}

use BlockType::{Bf16, F16, F32, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q6K, Q8_0};

impl BlockType {
    /// All that are read: number in a file, name, numbers of a block, bytes of a block.
    pub const ALL: [(BlockType, u32, &'static str, u64, u64); 10] = [
        (F32, 0, "F32", 1, 4),
        (F16, 1, "F16", 1, 2),
        (Bf16, 30, "BF16", 1, 2),
        (Q4_0, 2, "Q4_0", 32, 18),
        (Q4_1, 3, "Q4_1", 32, 20),
        (Q5_0, 6, "Q5_0", 32, 22),
        (Q5_1, 7, "Q5_1", 32, 24),
        (Q8_0, 8, "Q8_0", 32, 34),
        (Q4K, 12, "Q4_K", 256, 144),
        (Q6K, 14, "Q6_K", 256, 210),
    ];

    /// The type with this number in a file; for others their name where there is one.
    ///
    /// # Errors
    /// The name, or the number, of a type that is not read.
    pub fn from_number(number: u32) -> std::result::Result<BlockType, String> {
        let known = BlockType::ALL.iter().find(|known| known.1 == number);
        known.map(|known| known.0).ok_or_else(|| {
            let name = match number {
                9 => "Q8_1",
                10 => "Q2_K",
                11 => "Q3_K",
                13 => "Q5_K",
                15 => "Q8_K",
                16 => "IQ2_XXS",
                17 => "IQ2_XS",
                18 => "IQ3_XXS",
                19 => "IQ1_S",
                20 => "IQ4_NL",
                21 => "IQ3_S",
                22 => "IQ2_S",
                23 => "IQ4_XS",
                24 => "I8",
                25 => "I16",
                26 => "I32",
                27 => "I64",
                28 => "F64",
                29 => "IQ1_M",
                34 => "TQ1_0",
                35 => "TQ2_0",
                39 => "MXFP4",
                _ => return format!("type number {number}"),
            };
            name.to_owned()
        })
    }

    fn row(self) -> &'static (BlockType, u32, &'static str, u64, u64) {
        // Every type is in the list: a test goes through them.
        BlockType::ALL
            .iter()
            .find(|known| known.0 == self)
            .unwrap_or(&BlockType::ALL[0])
    }

    /// Numbers of a block.
    pub fn numbers(self) -> u64 {
        self.row().3
    }

    /// Bytes of a block.
    pub fn bytes(self) -> u64 {
        self.row().4
    }

    /// The field's name of the type.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Appends the numbers of whole blocks. Products and sums are f32, rounded one by one in the order of the ggml
    /// library, so that all readers agree in every bit.
    pub fn dequantize(self, blocks: &[u8], out: &mut Vec<f32>) {
        for block in blocks.chunks_exact(self.bytes() as usize) {
            match self {
                F32 => out.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
                F16 => out.push(half(block, 0)),
                Bf16 => out.push(bf16::from_le_bytes([block[0], block[1]]).to_f32()),
                Q4_0 => {
                    let d = half(block, 0);
                    nibbles(&block[2..18], out, |code, _| (code as f32 - 8.0) * d);
                }
                Q4_1 => {
                    let (d, m) = (half(block, 0), half(block, 2));
                    nibbles(&block[4..20], out, |code, _| code as f32 * d + m);
                }
                Q5_0 => {
                    let (d, top) = (half(block, 0), word(block, 2));
                    nibbles(&block[6..22], out, |code, i| (fifth(code, top, i) - 16.0) * d);
                }
                Q5_1 => {
                    let (d, m, top) = (half(block, 0), half(block, 2), word(block, 4));
                    nibbles(&block[8..24], out, |code, i| fifth(code, top, i) * d + m);
                }
                Q8_0 => {
                    let d = half(block, 0);
                    out.extend(block[2..].iter().map(|&code| f32::from(code as i8) * d));
                }
                Q4K => q4_k(block, out),
                Q6K => q6_k(block, out),
            }
        }
    }
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// The code with bit i of a word above its four.
fn fifth(code: u8, top: u32, i: usize) -> f32 {
    (u32::from(code) | ((top >> i) & 1) << 4) as f32
}

/// 4-bit codes: all low halves of the bytes, then all high ones. The function takes code and index.
fn nibbles(bytes: &[u8], out: &mut Vec<f32>, value: impl Fn(u8, usize) -> f32) {
    let codes = bytes
        .iter()
        .map(|byte| byte & 15)
        .chain(bytes.iter().map(|byte| byte >> 4));
    out.extend(codes.enumerate().map(|(i, code)| value(code, i)));
}

/// d, dmin, 12 bytes of scales and minima, 128 bytes of codes: for each 64 numbers the low halves, then the high ones.
fn q4_k(block: &[u8], out: &mut Vec<f32>) {
    let (d, dmin) = (half(block, 0), half(block, 2));
    let packed = &block[4..16];
    for group in 0..8 {
        // Groups 0 to 3 have their six bits in one byte each; those of 4 to 7 are split in four and two.
        let (scale, minimum) = if group < 4 {
            (packed[group] & 63, packed[group + 4] & 63)
        } else {
            (
                packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
                packed[group + 4] >> 4 | packed[group] >> 6 << 4,
            )
        };
        let (scale, minimum) = (d * f32::from(scale), dmin * f32::from(minimum));
        let codes = &block[16 + group / 2 * 32..][..32];
        let shift = group % 2 * 4;
        out.extend(
            codes
                .iter()
                .map(|byte| f32::from(byte >> shift & 15) * scale - minimum),
        );
    }
}

/// 128 bytes of low halves, 64 bytes of upper two bits, 16 scales, d.
fn q6_k(block: &[u8], out: &mut Vec<f32>) {
    let d = half(block, 208);
    for i in 0..256 {
        // Each half of the block is four runs of 32 numbers that share bytes.
        let (part, run, lane) = (i / 128, i % 128 / 32, i % 32);
        let low = block[part * 64 + run % 2 * 32 + lane] >> (run / 2 * 4) & 15;
        let high = block[128 + part * 32 + lane] >> (run * 2) & 3;
        let scale = f32::from(block[192 + i / 16] as i8);
        out.push(d * scale * (f32::from(low | high << 4) - 32.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Items of hex digits, so many each.
    fn hex(text: &str, digits: usize) -> Vec<u32> {
        (0..text.len())
            .step_by(digits)
            .map(|at| u32::from_str_radix(&text[at..at + digits], 16).unwrap())
            .collect()
    }

    #[test]
    fn blocks_become_the_numbers_of_the_ggml_package_bit_for_bit() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/gguf_blocks.json");
        let golden: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert_eq!(golden.as_object().unwrap().len(), BlockType::ALL.len());
        for (kind, number, name, numbers, bytes) in BlockType::ALL {
            assert_eq!(BlockType::from_number(number), Ok(kind));
            assert_eq!(
                (kind.name(), kind.numbers(), kind.bytes()),
                (name, numbers, bytes)
            );
            let case = &golden[name];
            let blocks: Vec<_> = hex(case["blocks"].as_str().unwrap(), 2)
                .iter()
                .map(|&byte| byte as u8)
                .collect();
            let mut values = Vec::new();
            kind.dequantize(&blocks, &mut values);
            let bits: Vec<_> = values.iter().map(|value| value.to_bits()).collect();
            let expected = hex(case["values"].as_str().unwrap(), 8);
            assert!(expected.len() >= 64 && blocks.len() as u64 / bytes * numbers == expected.len() as u64);
            let wrong = bits
                .iter()
                .zip(&expected)
                .position(|(bits, expected)| bits != expected);
            assert!(
                bits.len() == expected.len() && wrong.is_none(),
                "{name}: {wrong:?}"
            );
        }
    }

    #[test]
    fn other_types_are_named() {
        assert_eq!(BlockType::from_number(13), Err("Q5_K".to_owned()));
        assert_eq!(BlockType::from_number(4), Err("type number 4".to_owned()));
        assert_eq!(
            BlockType::from_number(u32::MAX),
            Err("type number 4294967295".to_owned())
        );
    }
}
