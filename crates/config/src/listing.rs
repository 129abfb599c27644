//! The key table as text for people: what `phalanx config` prints.

use super::{SECTIONS, keys, preset};

/// How the sources of a configuration override each other; then, section by section, every key with
/// its default, its accepted values and its meaning.
pub fn listing() -> String {
    let names: Vec<&str> = preset::names().collect();
    let mut text = format!(
        "A configuration is a preset, changed by a TOML file, changed by --set key=value.\n\
         A file names its preset in its first line, preset = \"NAME\"; --preset overrides it.\n\
         A file that names none starts from preset \"{}\";\n\
         one with its own [model] starts from the defaults below.\n\
         Presets: {}.\n",
        preset::DEFAULT,
        names.join(", "),
    );
    for section in SECTIONS {
        text += &format!("\n[{section}]\n");
        for key in keys().filter(|key| key.section() == section && key.later.is_none()) {
            let doc: Vec<&str> = key.doc.split_whitespace().collect();
            text += &format!("  {:<22} {}\n", key.field(), doc.join(" "));
            let expects = (key.expects)();
            text += &format!("  {:<22} {expects}; default {}\n", "", key.default);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_that_works_is_listed_with_its_default() {
        let text = listing();
        for key in keys().filter(|key| key.later.is_none()) {
            assert!(text.contains(&format!("\n  {} ", key.field())), "{}", key.name);
            assert!(text.contains(&format!("; default {}\n", key.default)));
        }
    }
}
