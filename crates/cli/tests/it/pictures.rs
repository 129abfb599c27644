//! What the pages in `docs/systems` quote is what the command prints and draws.

use std::fs;
use std::path::Path;

use crate::command::phalanx;

/// Each quoted command with the lines below it.
fn quotes(page: &str) -> Vec<(&str, String)> {
    let blocks = page.split("```").skip(1).step_by(2);
    let quoted = blocks.filter_map(|block| block.split_once("\n$ phalanx schedule "));
    quoted
        .map(|(_, rest)| rest.split_once('\n').unwrap())
        .map(|(command, output)| (command, output.to_owned()))
        .collect()
}

#[test]
fn quoted_schedules_are_what_is_printed_and_drawn() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let dir = tempfile::tempdir().unwrap();
    let drawn = dir.path().join("docs/pictures");
    fs::create_dir_all(&drawn).unwrap();
    let mut printed = 0;
    for page in ["naive", "gpipe", "one_f_one_b", "interleaved", "breadth_first", "zero_bubble"] {
        let text = fs::read_to_string(docs.join(format!("systems/{page}.md"))).unwrap();
        for (command, output) in quotes(&text) {
            let words: Vec<&str> = command.split_whitespace().collect();
            let found = phalanx(dir.path(), &[&["schedule"], &words]).ok().out;
            if !words.contains(&"--svg") {
                assert_eq!(found, output, "{page}: {command}");
                printed += 1;
            }
        }
    }
    assert!(printed > 8, "{printed} quotes");
    for picture in ["gpipe", "1f1b", "interleaved", "breadth_first", "zero_bubble"] {
        let read =
            |folder: &Path| fs::read_to_string(folder.join(format!("{picture}.svg"))).unwrap();
        assert_eq!(read(&drawn), read(&docs.join("pictures")), "{picture}");
    }
}
