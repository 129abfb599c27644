//! Text from users and their files, made fit for a terminal.

use std::borrow::Cow;

/// A longer line is cut in the middle.
const LONGEST: usize = 1200;
/// What stays of a cut line: its beginning and its end.
const BEGINNING: usize = 300;
const END: usize = 200;

/// The text with control characters escaped, so that a name cannot command the terminal, and with
/// the middle of very long lines cut out. Ends of lines stay.
pub fn printable(text: &str) -> Cow<'_, str> {
    let control = |c: char| c.is_control() && c != '\n';
    if !text.contains(control) && text.lines().all(|line| line.len() <= LONGEST) {
        return Cow::Borrowed(text);
    }
    let lines: Vec<String> = text.split('\n').map(|line| cut(line, control)).collect();
    Cow::Owned(lines.join("\n"))
}

fn cut(line: &str, control: impl Fn(char) -> bool) -> String {
    let escaped = |chars: &mut dyn Iterator<Item = char>| {
        let mut text = String::new();
        for c in chars {
            match control(c) {
                true => text.extend(c.escape_default()),
                false => text.push(c),
            }
        }
        text
    };
    let length = line.chars().count();
    if length <= LONGEST {
        return escaped(&mut line.chars());
    }
    let left_out = length - BEGINNING - END;
    format!(
        "{}… ({left_out} characters) …{}",
        escaped(&mut line.chars().take(BEGINNING)),
        escaped(&mut line.chars().skip(length - END))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_command_the_terminal() {
        assert_eq!(printable("a\u{1b}[31mred\u{7}\r\tb"), "a\\u{1b}[31mred\\u{7}\\r\\tb");
        assert_eq!(printable("two\nlines, 3 µs"), "two\nlines, 3 µs");
    }

    #[test]
    fn long_lines_keep_their_ends() {
        let text = format!("unknown key {} (config.toml:3)\nshort", "x".repeat(1_000_000));
        let shown = printable(&text);
        assert!(shown.len() < 600, "{}", shown.len());
        assert!(shown.starts_with("unknown key xxx"), "{shown}");
        assert!(shown.ends_with("xxx (config.toml:3)\nshort"), "{shown}");
    }
}
