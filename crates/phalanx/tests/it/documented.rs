//! Every item of the first page has an example, or names the item that shows it.

use std::path::Path;

/// Errors are shown where they are met; `Chain` and `Mlp` where they are defined.
const ELSEWHERE: [&str; 6] = [
    "phalanx_spmd::SpmdError;",
    "phalanx_data::DataError;",
    "phalanx_ir::IrError;",
    "phalanx_error::{Problem, Remedy, Result};",
    "phalanx_models::{Chain, Mlp};",
    "phalanx_models::hf::HfError;",
];

#[test]
fn every_export_has_an_example() {
    let rooms = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/exports");
    let mut seen = 0;
    for room in std::fs::read_dir(rooms).unwrap() {
        let text = std::fs::read_to_string(room.unwrap().path()).unwrap();
        let mut docs = String::new();
        for line in text.lines() {
            let Some(item) = line.strip_prefix("pub use ") else {
                docs.push_str(line);
                continue;
            };
            let shown = docs.contains("/// ```") || docs.contains("[`");
            assert!(shown || ELSEWHERE.contains(&item), "`{item}` has no example");
            docs.clear();
            seen += 1;
        }
    }
    assert!(seen > 30, "only {seen} exports were found");
}
