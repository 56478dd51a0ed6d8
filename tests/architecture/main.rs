//! Checks the crate's own sources against the rules of the architecture. `rules.rs` has the order of the rooms and the eight rules;
//! `exceptions.txt` lists the current exceptions. When an exception is fixed, remove it from the list:
//! `ARCHITECTURE=renew cargo test --test architecture` rewrites the list, but new entries must be fixed instead. With
//! `-- --nocapture` the test prints the number of exceptions per rule and the files that form circles;
//! `ARCHITECTURE_DOT=imports.dot` writes the import graph to a file.

mod callers;
mod circles;
mod exceptions;
mod methods;
mod modules;
mod paths;
mod resolve;
mod rules;
mod snippets;

use exceptions::Exceptions;
use modules::{Crate, Sources};
use rules::Rule;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const LIST: &str = "tests/architecture/exceptions.txt";

/// Reads every source file that the rules apply to.
fn sources() -> Sources {
    let mut sources = Sources::new();
    for folder in ["src", "tests", "benches", "examples", "kernels"] {
        read(Path::new(folder), &mut sources);
    }
    sources
}

fn read(folder: &Path, sources: &mut Sources) {
    for entry in std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.expect("a readable folder").path();
        let is_source = path.extension().is_some_and(|e| ["rs", "cl", "c", "h", "py"].iter().any(|known| e == *known));
        if path.is_dir() {
            read(&path, sources);
        } else if is_source {
            let name = path.to_str().expect("names are UTF-8").replace('\\', "/");
            let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{name}: {e}"));
            sources.insert(name, text);
        }
    }
}

#[test]
fn sources_follow_the_rules_of_the_architecture() {
    let sources = sources();
    let all = Crate::parse(&sources);
    let imports = all.imports();
    let violations = rules::violations(&sources, &all, &imports);
    let graph = circles::graph(&imports);
    let circles = circles::circles(&graph);
    let loose = |file: &&String| file.strip_prefix("src/ops/").is_some_and(|inside| !inside.contains('/'));
    let limits = BTreeMap::from([
        ("files-in-the-largest-circle".to_string(), circles.first().map_or(0, BTreeSet::len)),
        ("loose-files-in-ops".to_string(), sources.keys().filter(loose).count()),
    ]);

    let list = Exceptions::parse(&std::fs::read_to_string(LIST).expect("the list of exceptions"));
    let renewed = list.renewed(&violations, limits.clone());
    println!("{} files import {} times", graph.len(), graph.values().map(BTreeSet::len).sum::<usize>());
    for rule in Rule::ALL {
        println!("{}: {} exceptions", rule.name(), renewed.count(rule));
    }
    for circle in &circles {
        println!("circle of {}: {}", circle.len(), circle.iter().cloned().collect::<Vec<_>>().join(" "));
    }
    if let Some(file) = std::env::var_os("ARCHITECTURE_DOT") {
        std::fs::write(file, circles::dot(&graph)).expect("the graph is written");
    }

    if std::env::var("ARCHITECTURE").is_ok_and(|what| what == "renew") {
        print!("{}", renewed.text());
        return std::fs::write(LIST, renewed.text()).expect("the list is written");
    }
    let complaints = list.complaints(&violations, &limits);
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
}

/// Checks that no file is outside all modules, because the rules would not apply to it.
#[test]
fn every_file_is_in_a_module() {
    let sources = sources();
    let all = Crate::parse(&sources);
    let reached: BTreeSet<&String> = all.modules.iter().map(|module| &module.file).collect();
    let lost: Vec<_> = sources.keys().filter(|file| file.starts_with("src/") && file.ends_with(".rs")).collect();
    let lost: Vec<_> = lost.into_iter().filter(|file| !reached.contains(file)).collect();
    assert!(lost.is_empty(), "no `mod` declares {lost:?}");
}

/// Checks `#[track_caller]`, without which memory histories could not name the line that called an operation.
#[test]
fn methods_that_return_tensors_track_their_callers() {
    let untracked: Vec<String> = sources().iter().flat_map(|(file, text)| callers::untracked(file, text)).collect();
    assert!(untracked.is_empty(), "these give tensors and are not #[track_caller]:\n{}", untracked.join("\n"));
}
