//! The key table as text for people: what `phalanx help config` prints.

use super::{SECTIONS, keys};

/// Every key with its default, what it accepts and what it does, section by section.
pub fn listing() -> String {
    let mut text = String::new();
    for section in SECTIONS {
        if !text.is_empty() {
            text.push('\n');
        }
        text += &format!("[{section}]\n");
        for key in keys().filter(|key| key.section() == section) {
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
    fn every_key_is_listed_with_its_default() {
        let text = listing();
        for key in keys() {
            assert!(text.contains(&format!("\n  {} ", key.field())), "{}", key.name);
            assert!(text.contains(&format!("; default {}\n", key.default)));
        }
    }
}
