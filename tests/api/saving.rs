//! Files are replaced atomically: a failed write keeps the old file, and a successful write keeps the file's name, mode and
//! symbolic link.

use std::fs;
use std::path::Path;
use std::process::Command;

use claystone::nn::StateDict;
use claystone::storage::Snapshot;
use claystone::{Device, Error, Result, Tensor, io};

/// The environment variable that gives a child process its folder. The child's file sizes are limited.
const FULL: &str = "CLAYSTONE_FULL_DISK";
/// The limit of file sizes in KiB: larger than the old files, smaller than the new files.
const LIMIT: &str = "64";

type Writer = (&'static str, fn(&Path, usize) -> Result<()>);

fn state(elements: usize) -> StateDict {
    [("weight".to_string(), Tensor::ones(elements, Device::Cpu).unwrap())].into_iter().collect()
}

fn snapshot(bytes: usize) -> Snapshot {
    let setting = claystone::storage::Setting::Text("x".repeat(4 * bytes));
    let mut snapshot = Snapshot::default();
    snapshot.allocator_settings.insert("text".to_string(), setting);
    snapshot
}

const WRITERS: [Writer; 5] = [
    ("x.safetensors", |path, n| io::save(path, &state(n))),
    ("x.npz", |path, n| io::save(path, &state(n))),
    ("x.npy", |path, n| io::write_npy(path, &Tensor::ones(n, Device::Cpu)?)),
    ("x.json", |path, n| snapshot(n).save(path)),
    ("x.pickle", |path, n| snapshot(n).save(path)),
];

#[test]
fn failed_writes_keep_the_old_file() {
    if let Some(folder) = std::env::var_os(FULL) {
        for (name, write) in WRITERS {
            let error = write(&Path::new(&folder).join(name), 1 << 20).unwrap_err();
            assert!(matches!(&error, Error::Invalid { reason, .. } if reason.contains(name)), "{error}");
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    WRITERS.iter().for_each(|(name, write)| write(&folder.path().join(name), 100).unwrap());
    let before = WRITERS.map(|(name, _)| fs::read(folder.path().join(name)).unwrap());
    // The shell ignores SIGXFSZ, so writing beyond the limit returns an error, as on a full disk.
    let full = Command::new("bash")
        .args(["-c", &format!("trap '' XFSZ; ulimit -f {LIMIT}; exec \"$0\" \"$@\"")])
        .arg(std::env::current_exe().unwrap())
        .args(["saving::failed_writes_keep_the_old_file", "--exact"])
        .env(FULL, folder.path())
        .output()
        .unwrap();
    let passed = String::from_utf8_lossy(&full.stdout).contains("1 passed");
    assert!(full.status.success() && passed, "{full:?}");
    let after = WRITERS.map(|(name, _)| fs::read(folder.path().join(name)).unwrap());
    assert!(before == after, "a file that could not be written is not what it was");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), WRITERS.len(), "nothing else is left");
}

#[cfg(unix)]
#[test]
fn links_and_modes_are_kept() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let mode = |name: &str| fs::metadata(file(name)).unwrap().permissions().mode() & 0o777;
    fs::create_dir(file("elsewhere")).unwrap();
    fs::File::create(file("plain")).unwrap();
    for (name, write) in WRITERS {
        let (there, link) = (format!("elsewhere/{name}"), format!("link {name}"));
        symlink(&there, file(&link)).unwrap();
        // Writing through a symbolic link writes the link's target, whether or not the target exists.
        for elements in [10, 1000] {
            write(&file(&link), elements).unwrap();
            assert!(fs::symlink_metadata(file(&link)).unwrap().is_symlink() && file(&there).is_file());
            write(&file(name), elements).unwrap();
            assert!(fs::read(file(name)).unwrap() == fs::read(file(&there)).unwrap(), "{name}");
        }
        write(&file(&there), 1).unwrap();
        assert_eq!(mode(name), mode("plain"), "{name}");
        fs::set_permissions(file(name), fs::Permissions::from_mode(0o604)).unwrap();
        write(&file(name), 10).unwrap();
        assert_eq!(mode(name), 0o604, "{name}");
        assert!(write(&file("elsewhere"), 1).is_err() && file("elsewhere").is_dir());
    }
    for (device, there) in [("/dev/null", true), ("/dev/full", false)] {
        assert_eq!(io::write_npy(device, &Tensor::ones(10, Device::Cpu).unwrap()).is_ok(), there, "{device}");
        assert!(!fs::metadata(device).unwrap().is_file(), "{device} is what it was");
    }
}
