//! Unknown names, and the known name that was probably meant.

use toml_edit::Item;

use super::key::Key;
use super::{SECTIONS, absent, keys};
use phalanx_error::{Location, Problem};

/// The problem with an unknown key that was given a value.
pub(crate) fn unknown_key(name: &str, found: &str, place: Location) -> Problem {
    let one_line = !found.is_empty() && !found.contains('\n');
    let found = if one_line { format!(" = {found}") } else { String::new() };
    let problem = Problem::new(format!("unknown key {name}{found}")).at(place);
    if name.ends_with(".preset") {
        return problem.fix("write preset = \"NAME\" above the first section");
    }
    let field = name.rsplit('.').next().unwrap_or(name);
    if let Some(instead) = absent::instead(field) {
        return problem.fix(instead);
    }
    if let Some(key) = meant(name) {
        return problem.guess(key);
    }
    let section = name.split('.').next().unwrap_or(name);
    match SECTIONS.contains(&section) {
        true => problem.because(format!("[{section}] has {}", fields(section))),
        false => problem.because(format!("sections: {}", SECTIONS.join(", "))),
    }
}

fn fields(section: &str) -> String {
    let works = |key: &&Key| key.section() == section && key.later.is_none();
    let fields: Vec<&str> = keys().filter(works).map(Key::field).collect();
    fields.join(", ")
}

/// The problem with a table inside a section, `[model.x]`. Its keys show what was meant.
pub(crate) fn not_nested(section: &str, name: &str, item: &Item, place: Location) -> Problem {
    let problem = Problem::new(format!("unknown section [{section}.{name}]"))
        .at(place)
        .because("a section holds keys, not other sections");
    let inner = item.as_table_like().and_then(|table| table.iter().next().map(|(key, _)| key));
    match inner.and_then(|key| meant(&format!("{section}.{key}"))) {
        Some(key) => problem.guess(key),
        None => problem.fix(format!("write its keys in [{section}]: {}", fields(section))),
    }
}

/// The problem with something at the top of a file that is not a section.
pub(crate) fn not_a_section(name: &str, item: &Item, place: Location) -> Problem {
    let known = SECTIONS.contains(&name);
    if item.is_array_of_tables() || known {
        return Problem::new(format!("{name} is not written as a section"))
            .at(place)
            .fix(format!("write [{name}] once, and its keys below"));
    }
    if item.is_table_like() {
        let problem = Problem::new(format!("unknown section [{name}]")).at(place);
        return match closest(name, SECTIONS) {
            Some(section) => problem.guess(format!("[{section}]")),
            None => problem.because(format!("sections: {}", SECTIONS.join(", "))),
        };
    }
    let problem = Problem::new(format!("{name} is outside of all sections")).at(place);
    match meant(name) {
        Some(key) => problem.guess(key),
        None => problem.because(format!("sections: {}", SECTIONS.join(", "))),
    }
}

/// The key that was probably meant by an unknown name: first the key with that name in other
/// systems, then the same name in another section, then the nearest spelling.
fn meant(name: &str) -> Option<&'static str> {
    let field = name.rsplit('.').next().unwrap_or(name);
    // Names such as `name` mean different things in different sections: the same one goes first.
    let section = name.split('.').next().unwrap_or(name);
    let find = |test: &dyn Fn(&Key) -> bool| {
        let mut here = keys().filter(|key| key.section() == section);
        let key = here.find(|key| test(key));
        key.or_else(|| keys().find(|key| test(key))).map(|key| key.name)
    };
    find(&|key| key.aka.contains(&field)).or_else(|| find(&|key| key.field() == field)).or_else(
        || {
            let here = keys().filter(|key| key.section() == section).map(Key::field);
            let near = closest(field, here).or_else(|| closest(field, keys().map(Key::field)))?;
            find(&|key| key.field() == near)
        },
    )
}

/// The most letters of a word that may be a misspelt name.
const LONGEST_WORD: usize = 64;

/// The candidate nearest to `word`, unless more than a third of the word would have to change, or
/// more than one letter of a short word: most short words are two letters from some other.
pub fn closest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let letters = word.chars().count();
    // No name is that long, and comparing takes time and memory.
    if letters > LONGEST_WORD {
        return None;
    }
    let limit = if letters <= 4 { 1 } else { letters.div_ceil(3) };
    candidates
        .into_iter()
        .map(|candidate| (distance(word, candidate), candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// The fewest insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    // Row i holds the distances between the first i letters of `a` and every beginning of `b`.
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let substituted = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = substituted.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_of_known_pairs() {
        for (a, b, expected) in [
            ("", "abc", 3),
            ("kitten", "sitting", 3),
            ("steps", "setps", 1),
            ("lr", "lr", 0),
            ("flaw", "lawn", 2),
        ] {
            assert_eq!(distance(a, b), expected, "{a} {b}");
            assert_eq!(distance(b, a), expected, "{b} {a}");
        }
    }

    #[test]
    fn only_near_names_are_suggested() {
        let known = ["train.steps", "train.seq_len", "optim.lr"];
        assert_eq!(closest("train.setps", known), Some("train.steps"));
        assert_eq!(closest("train.seqlen", known), Some("train.seq_len"));
        assert_eq!(closest("banana", known), None);
    }
}
