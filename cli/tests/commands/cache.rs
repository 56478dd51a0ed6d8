//! `claystone cache`: the cache of compiled kernels.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// `claystone cache` must print the location and size of the files, remove them, and explain why a folder is not used.
#[test]
fn cache_command_shows_and_empties_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("cache");
    let cache = |value: &Path, args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_claystone"));
        command.arg("cache").args(args).env("CLAYSTONE_CACHE_DIR", value).env("CLAYSTONE_CACHE_MAXSIZE", "3145728");
        let done = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (done.status.success(), text(&done.stdout), text(&done.stderr))
    };
    let shown = |what: &str| (true, format!("{}: {what} of at most 3.0 MiB\n", folder.display()), String::new());
    assert_eq!(cache(&folder, &[]), shown("0 files, 0.0"), "not made yet");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, PermissionsExt::from_mode(0o700)).unwrap();
    let name = "0123456789abcdef".repeat(4);
    for (end, size) in [("clbin", 3 << 19), ("found", 1), ("tuning", 1 << 19)] {
        fs::write(folder.join(format!("{name}.{end}")), vec![0; size]).unwrap();
    }
    fs::write(folder.join("letter"), "of the user's").unwrap();
    assert_eq!(cache(&folder, &[]), shown("3 files, 2.0"));
    assert_eq!(cache(&folder, &["--clear"]), shown("1 file, 0.5"), "what was measured stays");
    assert_eq!((fs::read_dir(&folder).unwrap().count(), cache(&folder, &["--clear"])), (2, shown("1 file, 0.5")));
    fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).unwrap();
    let (good, _, error) = cache(&folder, &[]);
    assert!(!good && error.contains("0777") && error.contains("chmod 700"), "{error}");
    let (good, told, _) = cache(Path::new("off"), &[]);
    assert!(good && told.contains("there is no cache"), "{told}");
}
