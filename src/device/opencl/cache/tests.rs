//! Tests of the disk cache without a device.

use std::collections::HashMap;
use std::sync::Barrier;
use std::thread;

use super::super::mutate::{self, Random, mutated};
use super::*;

/// Makes a cache in its own folder, which no other user can access.
fn cache() -> (tempfile::TempDir, Cache) {
    let dir = tempfile::tempdir().unwrap();
    Folder::open(dir.path()).unwrap();
    let cache = Cache::new(dir.path(), 1 << 20);
    (dir, cache)
}

fn name(number: u8) -> String {
    FileKind::Program.name(&[number; 32])
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

fn bytes_in(folder: &Path) -> u64 {
    fs::read_dir(folder).unwrap().flatten().filter_map(|entry| entry.metadata().ok()).map(|file| file.len()).sum()
}

#[track_caller]
fn refused(cache: &Cache, name: &str, expected: io::ErrorKind) {
    let error = cache.load(name).unwrap_err();
    assert_eq!(error.kind(), expected, "{error}");
}

/// Sets a file's last use to `seconds` ago.
fn age(path: &Path, seconds: u64) {
    let then = SystemTime::now() - Duration::from_secs(seconds);
    File::options().append(true).open(path).unwrap().set_modified(then).unwrap();
}

#[test]
fn environment_variables_set_folder_and_size() {
    let of = |variables: &[(&str, &str)]| {
        let variables: HashMap<_, _> = variables.iter().copied().collect();
        Cache::from_variables(|name| variables.get(name).map(OsString::from)).map(|c| (c.folder, c.max_size))
    };
    let (at, sized) = (|folder: &str| Some((folder.into(), MAX_SIZE)), |size| Some(("/c".into(), size)));
    assert_eq!(of(&[]), None);
    assert_eq!(of(&[("HOME", "/home/me")]), at("/home/me/.cache/claystone"));
    assert_eq!(of(&[("HOME", "/home/me"), ("XDG_CACHE_HOME", "/x")]), at("/x/claystone"));
    // The XDG specification says to ignore relative paths.
    assert_eq!(of(&[("HOME", "/home/me"), ("XDG_CACHE_HOME", "x")]), at("/home/me/.cache/claystone"));
    assert_eq!(of(&[("HOME", "."), ("XDG_CACHE_HOME", "../x")]), None);
    assert_eq!(of(&[("HOME", "/home/me"), ("CLAYSTONE_CACHE_DIR", "/c")]), at("/c"));
    assert_eq!(of(&[("HOME", "/home/me"), ("CLAYSTONE_CACHE_DIR", "off")]), None);
    let asked = |size| of(&[("CLAYSTONE_CACHE_DIR", "/c"), ("CLAYSTONE_CACHE_MAXSIZE", size)]);
    assert_eq!(["1048576", "0", "much", "-1"].map(asked), [sized(1 << 20), None, sized(MAX_SIZE), sized(MAX_SIZE)]);
}

#[test]
fn contents_load_only_under_their_own_name() {
    let (dir, cache) = cache();
    refused(&cache, &name(1), io::ErrorKind::NotFound);
    for (number, contents) in [(1, &b"one"[..]), (2, b"two"), (1, b"one again")] {
        assert_eq!(cache.store(&name(number), contents).unwrap(), dir.path().join(name(number)));
        assert_eq!(cache.load(&name(number)).unwrap(), contents);
    }
    assert_eq!(names(dir.path()), [name(1), name(2)], "no temporary");

    // Exchanges the files of two kernels: each is intact, but must be refused, because its checksum does not match its name.
    let [one, two, aside] = [name(1), name(2), "aside".into()].map(|name| dir.path().join(name));
    for (from, to) in [(&one, &aside), (&two, &one), (&aside, &two)] {
        fs::rename(from, to).unwrap();
    }
    refused(&cache, &name(1), io::ErrorKind::InvalidData);
    refused(&cache, &name(2), io::ErrorKind::InvalidData);
    assert_eq!(names(dir.path()), [""; 0], "what is damaged is removed");

    // A file whose extension was changed to another kind's must also be removed.
    cache.store(&name(1), b"a program").unwrap();
    let found = FileKind::Probe.name(&[1; 32]);
    fs::rename(&one, dir.path().join(&found)).unwrap();
    refused(&cache, &found, io::ErrorKind::InvalidData);
}

/// No changed file may be loaded. `CLAYSTONE_MUTATIONS` sets the number of changed files.
#[test]
fn no_damaged_file_is_loaded() {
    let (dir, cache) = cache();
    let contents: Vec<u8> = (0..2000u32).flat_map(u32::to_le_bytes).collect();
    let path = cache.store(&name(1), &contents).unwrap();
    let reversed: Vec<u8> = contents.iter().rev().copied().collect();
    let whole = [fs::read(&path).unwrap(), seal(&name(2), &reversed), seal(&name(1), b"short")];
    let mut random = Random(0);
    for _ in 0..mutate::count(2000) {
        let bytes = mutated(&mut random, &whole);
        if whole.contains(&bytes) {
            continue;
        }
        fs::write(&path, &bytes).unwrap();
        refused(&cache, &name(1), io::ErrorKind::InvalidData);
    }
    fs::write(dir.path().join(name(1)), &whole[0]).unwrap();
    assert_eq!(cache.load(&name(1)).unwrap(), contents);
}

#[test]
fn least_recently_used_files_are_deleted_first() {
    let (dir, _) = cache();
    let cache = Cache::new(dir.path(), 100_000);
    let tuning = FileKind::Tuning.name(&[9; 32]);
    fs::write(dir.path().join("notes.txt"), "another's").unwrap();
    age(&cache.store(&tuning, b"measured for minutes").unwrap(), 10_000);
    for number in 1..=9 {
        age(&cache.store(&name(number), &[0; 9_900]).unwrap(), 1000 - u64::from(number));
    }
    assert_eq!(cache.load(&name(1)).unwrap(), [0; 9_900], "used again");
    cache.store(&name(10), &[0; 19_000]).unwrap();
    // The folder was shrunk to 15/16 of the bound, which deleted the least recently used files 2 and 3.
    let mut left: Vec<_> = [1, 4, 5, 6, 7, 8, 9, 10].map(name).into();
    left.extend([tuning, "notes.txt".into()]);
    left.sort_unstable();
    assert_eq!(names(dir.path()), left);
    for number in 11..=200 {
        cache.store(&name(number), &vec![0; 100 * usize::from(number)]).unwrap();
        assert!(bytes_in(dir.path()) <= 100_009);
    }
    cache.load(&name(200)).expect("the last");
    // Contents larger than the bound must be refused, and delete no other file.
    assert!(cache.store(&name(201), &[0; 100_000]).is_err());
    assert_eq!((names(dir.path()).contains(&name(201)), cache.load(&name(200)).is_ok()), (false, true));
}

#[test]
fn temporary_files_of_killed_processes_are_removed() {
    let (dir, cache) = cache();
    let temporary = |rest: &str| dir.path().join(format!("{}.{rest}.tmp", name(1)));
    let kept = [temporary("under-way"), dir.path().join("another's.tmp")];
    let gone = [temporary("old"), temporary("of the future")];
    [&kept, &gone].into_iter().flatten().for_each(|path| fs::write(path, "half").unwrap());
    age(&kept[1], 7200);
    age(&gone[0], 7200);
    File::options().append(true).open(&gone[1]).unwrap().set_modified(SystemTime::now() + 9 * STALE_AFTER).unwrap();
    cache.store(&name(2), b"whole").unwrap();
    assert_eq!([&kept, &gone].map(|paths| paths.iter().filter(|path| path.exists()).count()), [2, 0]);
}

/// Eight caches share a folder, as eight processes would, and write more than the bound all the time: every load must stay intact.
#[test]
fn caches_may_shrink_a_folder_concurrently() {
    let (dir, _) = cache();
    let start = Barrier::new(8);
    thread::scope(|scope| {
        for process in 0..8u8 {
            let (start, cache) = (&start, Cache::new(dir.path(), 50_000));
            scope.spawn(move || {
                start.wait();
                for round in 0..100u8 {
                    let name = FileKind::Program.name(&[round % 16; 32]);
                    let contents = vec![round % 16; 4000 + usize::from(process)];
                    cache.store(&name, &contents).unwrap();
                    // Contents that any of the caches stored under this name, or nothing after an eviction, but never half a file.
                    match cache.load(&name) {
                        Ok(loaded) => assert!(loaded.len() >= 4000 && loaded.iter().all(|&b| b == round % 16)),
                        Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}"),
                    }
                }
            });
        }
    });
    assert!(bytes_in(dir.path()) <= 50_000 && names(dir.path()).iter().all(|name| !name.ends_with(TEMPORARY)));
}

/// Tests of owners, modes, links and pipes.
#[cfg(unix)]
mod unix {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
    use std::process::Command;
    use std::sync::mpsc;

    use super::*;

    const OTHER: u32 = 12_345;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    /// True if this user may change the owner of files.
    fn is_root(path: &Path) -> bool {
        fs::metadata(path).unwrap().uid() == 0
    }

    #[test]
    fn folder_and_files_are_private() {
        let (dir, _) = cache();
        let folder = dir.path().join("a/b");
        let path = Cache::new(&folder, 1 << 20).store(&name(1), b"contents").unwrap();
        assert_eq!([&folder, &path].map(|path| mode(path)), [0o700, 0o600]);
        assert_eq!(mode(&dir.path().join("a")), 0o700, "as XDG has it");
    }

    #[test]
    fn a_folder_others_can_access_is_not_used() {
        let (dir, cache) = cache();
        cache.store(&name(1), b"contents").unwrap();
        let is_refused = |wide, files: &[String]| {
            set_mode(dir.path(), wide);
            refused(&cache, &name(1), io::ErrorKind::PermissionDenied);
            let error = cache.store(&name(2), b"contents").unwrap_err();
            assert!(error.to_string().contains(&format!("{wide:04o}")), "{error}");
            assert_eq!((mode(dir.path()), names(dir.path())), (wide, files.into()), "left as it was");
        };
        [0o777, 0o1777, 0o770, 0o720, 0o702].into_iter().for_each(|wide| is_refused(wide, &[name(1)]));
        // A folder that holds only cache files, and that other users cannot write to, must get mode 0700.
        for wide in [0o755, 0o750, 0o701] {
            set_mode(dir.path(), wide);
            assert_eq!(cache.load(&name(1)).unwrap(), b"contents");
            assert_eq!(mode(dir.path()), 0o700);
        }
        // A folder that holds other files as well, such as a home folder, must be left unchanged.
        fs::write(dir.path().join("letter"), "for all to read").unwrap();
        [0o755, 0o701].into_iter().for_each(|wide| is_refused(wide, &[name(1), "letter".into()]));
        set_mode(dir.path(), 0o700);
        assert_eq!(cache.load(&name(1)).unwrap(), b"contents");
    }

    #[test]
    fn files_of_other_users_are_not_used() {
        let (dir, cache) = cache();
        let path = cache.store(&name(1), b"contents").unwrap();
        for writable in [0o666, 0o620, 0o602] {
            set_mode(&path, writable);
            refused(&cache, &name(1), io::ErrorKind::PermissionDenied);
        }
        set_mode(&path, 0o644);
        assert_eq!(cache.load(&name(1)).unwrap(), b"contents");
        if !is_root(&path) {
            return;
        }
        chown(&path, Some(OTHER), None).unwrap();
        refused(&cache, &name(1), io::ErrorKind::PermissionDenied);
        cache.store(&name(1), b"ours").unwrap();
        assert_eq!(cache.load(&name(1)).unwrap(), b"ours", "and is replaced");
        chown(dir.path(), Some(OTHER), None).unwrap();
        refused(&cache, &name(1), io::ErrorKind::PermissionDenied);
        assert!(cache.store(&name(2), b"ours").unwrap_err().to_string().contains("12345"));
    }

    #[test]
    fn links_are_not_followed() {
        let (dir, cache) = cache();
        let elsewhere = tempfile::tempdir().unwrap();
        let precious = elsewhere.path().join("precious");
        let path = dir.path().join(name(1));
        // A link to a valid file, which must be neither read nor overwritten.
        fs::write(&precious, seal(&name(1), b"contents")).unwrap();
        symlink(&precious, &path).unwrap();
        assert!(cache.load(&name(1)).is_err());
        cache.store(&name(1), b"ours").unwrap();
        assert_eq!(cache.load(&name(1)).unwrap(), b"ours");
        assert_eq!(fs::read(&precious).unwrap(), seal(&name(1), b"contents"));
        // Links under all names that a temporary file would have if its name were predictable: no store may follow such a link.
        let stem = name(3).replace(".clbin", "");
        for serial in 0..100 {
            let target = elsewhere.path().join(serial.to_string());
            symlink(target, dir.path().join(format!("{stem}.{}-{serial}.tmp", std::process::id()))).unwrap();
        }
        for _ in 0..50 {
            cache.store(&name(3), b"three").unwrap();
        }
        assert_eq!(names(elsewhere.path()), ["precious"]);
        // The folder may be a link of this user, for example to a larger disk, but not another user's link.
        let link = elsewhere.path().join("link");
        symlink(dir.path(), &link).unwrap();
        let linked = Cache::new(&link, 1 << 20);
        assert_eq!(linked.load(&name(3)).unwrap(), b"three");
        if is_root(&precious) {
            std::os::unix::fs::lchown(&link, Some(OTHER), None).unwrap();
            refused(&linked, &name(3), io::ErrorKind::PermissionDenied);
        }
    }

    /// A user who can rename the folder can redirect its path after the check; files must then come from the checked folder.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_folder_replaced_after_the_check_is_not_used() {
        let (dir, moved) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = dir.path().join("cache");
        let cache = Cache::new(&path, 1 << 20);
        cache.store(&name(1), b"ours").unwrap();
        let folder = cache.open_folder().unwrap();
        fs::rename(&path, moved.path().join("cache")).unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join(name(1)), seal(&name(1), b"theirs")).unwrap();
        let mut file = open_private_file(&folder.at.join(name(1))).unwrap();
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        assert_eq!(unseal(&name(1), bytes).unwrap(), b"ours");
        assert_eq!(folder.files().unwrap().len(), 1);
        fs::remove_file(folder.at.join(name(1))).unwrap();
        assert_eq!([names(&path), names(&moved.path().join("cache"))], [vec![name(1)], vec![]]);
    }

    /// Opening a pipe blocks until the other end is opened, so the cache must not open a pipe.
    #[test]
    fn a_pipe_or_folder_in_place_of_a_file_does_not_block() {
        let (dir, cache) = cache();
        let pipe = dir.path().join(name(1));
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        fs::create_dir(dir.path().join(name(2))).unwrap();
        let (done, told) = mpsc::channel();
        thread::spawn(move || {
            let loaded = [1, 2].map(|number| cache.load(&name(number)).map_err(|error| error.kind()));
            let stored = [1, 2].map(|number| cache.store(&name(number), b"ours").is_ok());
            done.send((loaded, stored, cache.load(&name(1)).ok())).unwrap();
        });
        let told = told.recv_timeout(Duration::from_secs(60)).expect("it waits for nobody");
        let refused = Err(io::ErrorKind::PermissionDenied);
        assert_eq!(told, ([refused.clone(), refused], [true, false], Some(b"ours".to_vec())));
    }
}
