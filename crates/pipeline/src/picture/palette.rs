//! Colours that also work in grey-scale: forwards are light, second forwards somewhat darker,
//! weight gradients are in the middle, backwards are dark. The chunks of a stage group have shades
//! of similar lightness.

use super::TurnKind;

/// Shades of a part, from the first chunk to the last.
const SHADES: usize = 4;

impl TurnKind {
    /// The fill in pictures, and whether text on it is white.
    pub(super) fn fill(self, chunk: usize, chunks: usize) -> (&'static str, bool) {
        let shades: [&str; SHADES] = match self {
            TurnKind::Forward => ["#d5ecf8", "#c4e5f6", "#b2ddf4", "#a0d6f2"],
            TurnKind::Again => ["#8ad4b9", "#82ceb1", "#7ac8a9", "#72c2a1"],
            TurnKind::Weights => ["#e68a3c", "#da7f32", "#cd7629", "#c06c21"],
            TurnKind::Backward => ["#2362a5", "#105492", "#00467d", "#003867"],
        };
        (shades[shade(chunk, chunks)], self == TurnKind::Backward)
    }

    /// Codes for a terminal with 256 colours: background and text.
    pub(super) fn codes(self, chunk: usize, chunks: usize) -> (u8, u8) {
        let shades: [u8; SHADES] = match self {
            TurnKind::Forward => [153, 117, 110, 74],
            TurnKind::Again => [115, 79, 78, 72],
            TurnKind::Weights => [215, 214, 208, 172],
            TurnKind::Backward => [32, 26, 25, 18],
        };
        let text = if self == TurnKind::Backward { 231 } else { 16 };
        (shades[shade(chunk, chunks)], text)
    }
}

/// Chunks are spread over the shades: two chunks get the most different ones.
fn shade(chunk: usize, chunks: usize) -> usize {
    match chunks {
        0 | 1 => 0,
        _ => (chunk * (SHADES - 1) / (chunks - 1)).min(SHADES - 1),
    }
}
