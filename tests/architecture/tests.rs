//! Checks the crate's own sources against the rules of the architecture. `rules.rs` lists the rules, the order of the rooms and the
//! current exceptions. With `-- --nocapture` the test prints the files that import each other in a circle;
//! `ARCHITECTURE_DOT=imports.dot` writes the import graph to a file.

mod callers;
mod circles;
mod methods;
mod modules;
mod paths;
mod resolve;
mod rules;
mod snippets;

use modules::{Crate, Sources};
use std::collections::BTreeSet;
use std::path::Path;

/// Reads every source file that the rules apply to.
fn sources() -> Sources {
    let mut sources = Sources::new();
    read("src", &mut sources);
    sources
}

/// Adds the Rust files of a folder and its subfolders.
fn read(folder: &str, sources: &mut Sources) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for entry in root.join(folder).read_dir().unwrap_or_else(|e| panic!("{folder}: {e}")) {
        let entry = entry.expect("a readable folder");
        let name = format!("{folder}/{}", entry.file_name().to_str().expect("names are UTF-8"));
        if entry.path().is_dir() {
            read(&name, sources);
        } else if name.ends_with(".rs") {
            let text = std::fs::read_to_string(entry.path()).unwrap_or_else(|e| panic!("{name}: {e}"));
            sources.insert(name, text);
        }
    }
}

#[test]
fn sources_follow_the_rules_of_the_architecture() {
    let sources = sources();
    let all = Crate::parse(&sources);
    let imports = all.imports();
    let complaints = rules::complaints(&rules::violations(&sources, &all, &imports), rules::EXCEPTIONS);
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));

    let loose = sources.keys().filter_map(|file| file.strip_prefix("src/ops/")).filter(|inside| !inside.contains('/'));
    assert!(loose.count() <= 2, "a family of operations is a folder");

    let graph = circles::graph(&imports);
    if let Some(file) = std::env::var_os("ARCHITECTURE_DOT") {
        std::fs::write(file, circles::dot(&graph)).expect("the graph is written");
    }
    let circles = circles::circles(&graph);
    for circle in &circles {
        println!("circle of {}: {}", circle.len(), circle.iter().cloned().collect::<Vec<_>>().join(" "));
    }
    let largest = circles.first().map_or(0, BTreeSet::len);
    assert_eq!(
        largest,
        rules::LARGEST_CIRCLE,
        "files in the largest circle: set LARGEST_CIRCLE to a smaller number only"
    );
}

/// Checks that every file belongs to a module, because the rules are applied to modules and would miss other files.
#[test]
fn every_file_is_in_a_module() {
    let sources = sources();
    let all = Crate::parse(&sources);
    let reached: BTreeSet<&String> = all.modules.iter().map(|module| &module.file).collect();
    let lost: Vec<_> = sources.keys().filter(|file| file.starts_with("src/") && file.ends_with(".rs")).collect();
    let lost: Vec<_> = lost.into_iter().filter(|file| !reached.contains(file)).collect();
    assert!(lost.is_empty(), "no `mod` declares {lost:?}");
}

/// Checks `#[track_caller]`. Without the attribute, memory histories would not name the user's line that called an operation.
#[test]
fn methods_that_return_tensors_track_their_callers() {
    let untracked: Vec<String> = sources().iter().flat_map(|(file, text)| callers::untracked(file, text)).collect();
    assert!(untracked.is_empty(), "these give tensors and are not #[track_caller]:\n{}", untracked.join("\n"));
}
