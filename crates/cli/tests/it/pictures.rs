//! What the pages in `docs/systems` show as drawings is what their commands draw.

use std::fs;
use std::path::Path;

use crate::command::phalanx;

#[test]
fn drawings_in_the_documentation_are_what_is_drawn() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let dir = tempfile::tempdir().unwrap();
    let drawn = dir.path().join("docs/pictures");
    fs::create_dir_all(&drawn).unwrap();
    let systems = [
        "gpipe",
        "vectorised",
        "one_f_one_b",
        "bpipe",
        "interleaved",
        "breadth_first",
        "zero_bubble",
        "v_half",
        "chimera",
        "dualpipe",
        "pipedream",
        "pipedream_2bw",
        "ring_attention",
        "expert_parallel",
    ];
    let pages = systems.map(|page| format!("systems/{page}.md")).into_iter();
    let others = ["parallelism.md", "traces.md"].map(str::to_owned);
    for page in pages.chain(others) {
        let text = fs::read_to_string(docs.join(page)).unwrap();
        let mut commands = text.lines().filter_map(|line| line.strip_prefix("$ phalanx "));
        let made_by = commands.find(|line| line.contains(" docs/pictures/")).unwrap();
        let words: Vec<&str> = made_by.split_whitespace().collect();
        phalanx(dir.path(), &[&words]).ok();
    }
    let mut compared = 0;
    for picture in fs::read_dir(docs.join("pictures")).unwrap() {
        let picture = picture.unwrap();
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        let (shown, made) = (read(&picture.path()), read(&drawn.join(picture.file_name())));
        assert!(shown == made, "{:?} is not what is drawn", picture.file_name());
        compared += 1;
    }
    assert!(compared >= 7, "only {compared} drawings");
}
