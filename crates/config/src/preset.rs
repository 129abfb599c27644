//! Configurations that are embedded in the binary.

/// The preset used where no source is named.
pub const DEFAULT: &str = "default";

const PRESETS: &[(&str, &str)] = &[
    (DEFAULT, include_str!("../presets/default.toml")),
    ("tiny", include_str!("../presets/tiny.toml")),
    ("tiny-moe", include_str!("../presets/tiny-moe.toml")),
    ("bench-13m", include_str!("../presets/bench-13m.toml")),
    ("bench-moe", include_str!("../presets/bench-moe.toml")),
    ("gpt2-124m", include_str!("../presets/gpt2-124m.toml")),
    ("llama-0.95b", include_str!("../presets/llama-0.95b.toml")),
    ("mnist-cnn", include_str!("../presets/mnist-cnn.toml")),
];

/// The names of all presets, the default one first.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

/// The TOML text of a preset.
pub fn text(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}
