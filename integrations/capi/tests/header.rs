//! Checks that the checked-in `include/claystone.h` is the header that cbindgen generates from `src/`.

use std::fs;
use std::path::Path;

#[test]
fn checked_in_header_matches_the_source() {
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(home.join("cbindgen.toml")).expect("cbindgen.toml is read");
    let builder = cbindgen::Builder::new().with_config(config).with_src(home.join("src/lib.rs"));
    let mut made = Vec::new();
    builder.generate().expect("cbindgen reads src/").write(&mut made);
    let made = String::from_utf8(made).unwrap();

    let header = home.join("include/claystone.h");
    if std::env::var_os("UPDATE_HEADER").is_some() {
        fs::write(&header, &made).unwrap();
    }
    let kept = fs::read_to_string(&header).unwrap_or_default();
    let line = kept.lines().zip(made.lines()).position(|(a, b)| a != b);
    let advice = "include/claystone.h is out of date: run UPDATE_HEADER=1 cargo test -p claystone-capi --test header";
    assert!(kept == made, "{advice} (first difference at line {line:?}, counted from 0)");
}
