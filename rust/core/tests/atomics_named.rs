//! Reads the sources: atomics and loom are named in one file only, so that loom judges all of them.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The file that may name atomics: all others import it.
const NAMED_IN: [&str; 1] = ["sync/atomics.rs"];
const NAMES: [&str; 2] = ["atomic::", "loom::"];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The lines of code in which `text` uses one of the names.
fn uses(text: &str) -> Vec<usize> {
    let code = |line: &str| line.split("//").next().unwrap_or_default().to_owned();
    (1..)
        .zip(text.lines().map(code))
        .filter(|(_, code)| NAMES.iter().any(|name| code.contains(name)))
        .map(|(number, _)| number)
        .collect()
}

#[test]
fn atomics_are_named_in_one_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut uses_found = 0;
    for file in &files {
        let found = uses(&fs::read_to_string(file).expect("a source"));
        if NAMED_IN.iter().any(|named| file.ends_with(named)) {
            uses_found += usize::from(!found.is_empty());
        } else {
            let file = file.display();
            assert!(found.is_empty(), "{file}, lines {found:?}: import atomics from crate::sync");
        }
    }
    assert_eq!(
        uses_found,
        NAMED_IN.len(),
        "a file of {NAMED_IN:?} no longer names atomics: correct this test"
    );
}
