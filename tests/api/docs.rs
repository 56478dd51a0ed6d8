//! Checks what the documentation says about the code: configuration keys, and links to tests.

use std::path::Path;

use claystone::storage::Config;

const PAGE: &str = include_str!("../../docs/allocator.md");

#[test]
fn documented_configuration_keys_match_the_code() {
    let rows: Vec<&str> = PAGE.lines().skip_while(|line| !line.starts_with("| key |")).skip(2).collect();
    for (key, row) in Config::KEYS.iter().zip(rows) {
        assert_eq!(row, format!("| `{}` | `{}` | {} | {} |", key.name, key.default_value(), key.allowed, key.doc));
    }
    let first = format!("| `{}` |", Config::KEYS[0].name);
    let table = PAGE.lines().skip_while(|line| !line.starts_with(&first)).take_while(|line| line.starts_with('|'));
    assert_eq!(table.count(), Config::KEYS.len());
}

#[test]
fn linked_tests_exist() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let links: Vec<(&str, &str)> = PAGE
        .split("[`")
        .skip(1)
        .filter_map(|text| text.split_once("`](")) // a link whose text is the name of a test and whose target is a file
        .map(|(name, rest)| (name, rest.split(')').next().unwrap_or_default()))
        .filter(|(_, file)| file.ends_with(".rs"))
        .collect();
    assert!(links.len() > 40, "{}", links.len());
    for (name, file) in links {
        let text = std::fs::read_to_string(docs.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let function = text.find(&format!("fn {name}(")).unwrap_or_else(|| panic!("{file} has no {name}"));
        let before: Vec<&str> = text[..function].lines().rev().take(3).collect();
        assert!(before.iter().any(|line| line.trim() == "#[test]"), "{name} in {file} is no test");
    }
}
