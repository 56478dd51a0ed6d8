//! Tests of programs on every device: from source, from memory and from disk.

use std::fs;

use super::super::cache::seal;
use super::super::tests::{AXB, buffer, contents, devices};
use super::super::{Arg, count, discovery};
use super::*;

fn programs(of: &Programs) -> usize {
    of.loaded.0.iter().map(|loaded| lock(loaded).iter().count()).sum()
}

#[test]
fn comment_lines_do_not_change_a_program() {
    let code = "int a; // kept\n    asm(\"//@ wgmma\\n\");\n\nint b;\n";
    let commented = "// first\nint a; // kept\n    // indented\n    asm(\"//@ wgmma\\n\");\n\n//\nint b;";
    assert_eq!(without_comment_lines(commented), code);
    assert_eq!(without_comment_lines(code), code);
}

#[test]
fn hidden_instructions_are_enabled_only_for_sm_90() {
    let ptx = ".version 9.0\n.target sm_90, texmode_independent\n//@ a;\n//@ b;\n// c\n\0";
    let want = ".version 9.0\n.target sm_90a, texmode_independent\na;\nb;\n// c\n\0";
    assert_eq!(enable_hidden_instructions(ptx.as_bytes()).unwrap(), want);
    for other in
        [".target sm_80\n//@ a;", ".target sm_90\n// a", ".target sm_90a\n//@ a;", ".target sm_900\n//@ a;", ""]
    {
        assert_eq!(enable_hidden_instructions(other.as_bytes()), None, "{other}");
    }
    assert_eq!(enable_hidden_instructions(b"\x7fELF\xff"), None);
}

#[test]
fn a_register_limit_is_applied_or_ignored() {
    for device in devices() {
        let source = format!("{MOST_REGISTERS}64\n__kernel void limited(__global int* x) {{ x[0] = MOST_REGISTERS; }}");
        let kernel = device.build("limited", &source, "limited").unwrap();
        let out = buffer(device, &[0; 4]);
        device.launch(&kernel, &[Arg::Buffer(&out)], &[1], &[1]).unwrap();
        assert_eq!(contents(device, &out), 64i32.to_ne_bytes());
    }
}

#[test]
fn programs_are_loaded_from_disk() {
    for i in 0..count() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("made/on/demand");
        let cache = Cache::new(&dir, 64 << 20);
        let source = format!("__kernel void answer(__global int* x) {{ x[0] = 42; }} // {i}");
        // A newly opened device has no programs, like a new process.
        let fresh = || ClDevice::open(i, discovery::description(i).unwrap()).unwrap();
        let built = |device: &ClDevice| {
            let kernel = build_cached(device, Author::Crate, "answer", &source, "", "answer", Some(&cache)).unwrap();
            let out = buffer(device, &[0; 4]);
            device.launch(&kernel, &[Arg::Buffer(&out)], &[1], &[1]).unwrap();
            assert_eq!(contents(device, &out), 42i32.to_ne_bytes());
            device.programs.builds()
        };
        assert_eq!(built(&fresh()), (1, 0), "from source");
        let files: Vec<_> = fs::read_dir(&dir).unwrap().map(|f| f.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "one file, no temporary");
        let whole = fs::read(&files[0]).unwrap();
        assert_eq!(built(&fresh()), (0, 1), "from disk");

        // Damaged files: truncated, with a flipped bit, empty, or with a valid checksum but no valid binary.
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 1;
        let name = files[0].file_name().unwrap().to_str().unwrap();
        let refused = seal(name, b"this is no program");
        let damaged = [&whole[..whole.len() - 1], &whole[..20], &flipped, &[], &refused];
        for bytes in damaged {
            fs::write(&files[0], bytes).unwrap();
            let device = fresh();
            assert_eq!(built(&device), (1, 0), "from source");
            assert_eq!(built(&device), (1, 0), "then from memory");
            assert_eq!(built(&fresh()), (0, 1), "and the file is whole again");
        }
    }
}

#[test]
fn own_sources_build_without_the_header_on_pocl() {
    for i in 0..count() {
        let device = ClDevice::open(i, discovery::description(i).unwrap()).unwrap();
        let built = |by, call: &str, want: f32| {
            let source = format!("__kernel void f(__global float* x) {{ x[get_global_id(0)] = {call}; }} // {i}");
            let kernel = build_cached(&device, by, "f", &source, "", "f", None).unwrap();
            let out = buffer(&device, &[0; 4]);
            device.launch(&kernel, &[Arg::Buffer(&out)], &[1], &[1]).unwrap();
            assert_eq!(contents(&device, &out), want.to_ne_bytes(), "{call}");
            (device.programs.builds().0, device.programs.with_header.load(Relaxed))
        };
        assert_eq!(built(Author::Crate, "sqrt(4.0f)", 2.0), (1, 0));
        assert_eq!(built(Author::User, "cospi(2.0f)", 1.0), (2, 0));
        assert_eq!(
            built(Author::Crate, "cospi(2.0f)", 1.0),
            (2 + 1, u64::from(is_pocl(&device))),
            "none of ours calls that"
        );
    }
}

#[test]
fn no_binaries_of_own_programs_are_requested_from_pocl() {
    for i in 0..count() {
        let source = format!("__kernel void f(__global float* x) {{ x[0] = {i}; }} // {}", std::process::id());
        for _ in 0..2 {
            let device = ClDevice::open(i, discovery::description(i).unwrap()).unwrap();
            device.build("f", &source, "f").unwrap();
            if is_pocl(&device) {
                assert_eq!((device.programs.builds(), device.programs.slow_binaries.load(Relaxed)), ((1, 0), 0));
            }
        }
    }
}

/// If a swapped file were used, a kernel would run another kernel's program.
#[test]
fn swapped_cache_files_are_not_used() {
    for i in 0..count() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(dir.path(), 64 << 20);
        // A newly opened device has no programs, like a new process.
        let answers = || {
            let device = ClDevice::open(i, discovery::description(i).unwrap()).unwrap();
            let answer = |n: i32| {
                let source = format!("__kernel void answer(__global int* x) {{ x[0] = {n}; }} // {i}");
                let kernel =
                    build_cached(&device, Author::User, "answer", &source, "", "answer", Some(&cache)).unwrap();
                let out = buffer(&device, &[0; 4]);
                device.launch(&kernel, &[Arg::Buffer(&out)], &[1], &[1]).unwrap();
                contents(&device, &out)[0]
            };
            ([1, 2].map(answer), device.programs.builds())
        };
        let right = [1, 2];
        assert_eq!(answers(), (right, (2, 0)));
        assert_eq!(answers(), (right, (0, 2)));
        let files: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|f| f.unwrap().path()).collect();
        let [one, two] = [0, 1].map(|f| fs::read(&files[f]).unwrap());
        fs::write(&files[0], two).unwrap();
        fs::write(&files[1], one).unwrap();
        assert_eq!(answers(), (right, (2, 0)), "from source");
        assert_eq!(answers(), (right, (0, 2)), "and the files are right again");
    }
}

/// Programs of dropped kernels must be released, except the latest [`MAX_OF_USERS`].
#[test]
fn programs_of_dropped_kernels_are_released() {
    for i in 0..count() {
        let device = ClDevice::open(i, discovery::description(i).unwrap()).unwrap();
        let build = |n: usize| {
            let source = format!("__kernel void number(__global int* x) {{ x[0] = {n}; }}");
            build_cached(&device, Author::User, "number", &source, "", "number", None).unwrap()
        };
        let held = build(0);
        let first = Arc::downgrade(&build(1).program);
        for n in [1, 0] {
            build(n);
        }
        assert_eq!((device.programs.builds(), first.strong_count()), ((2, 0), 1), "made again without the compiler");
        (2..=MAX_OF_USERS + 1).for_each(|n| drop(build(n)));
        assert_eq!(first.strong_count(), 0, "released");
        let out = buffer(&device, &[9; 4]);
        device.launch(&held, &[Arg::Buffer(&out)], &[1], &[1]).unwrap();
        assert_eq!(
            (contents(&device, &out), programs(&device.programs)),
            (vec![0; 4], MAX_OF_USERS),
            "this one has a kernel"
        );
    }
    // Many users' sources must not evict programs of the crate.
    let all = Programs::default();
    for n in 0..1000u32 {
        let key = |by: u8| std::array::from_fn(|i| if i < 4 { n.to_le_bytes()[i] } else { by });
        all.slot(key(0), Author::User);
        all.slot([(n % 10) as u8; 32], Author::Crate);
    }
    assert_eq!(programs(&all), MAX_OF_USERS + 10);
}

#[test]
fn an_unwritable_cache_does_not_stop_builds() {
    for device in devices() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // A folder inside a file cannot be created.
        let cache = Cache::new(file.path().join("cache"), 64 << 20);
        build_cached(device, Author::Crate, "axb", &format!("{AXB} // no disk"), "", "axb", Some(&cache)).unwrap();
        build_cached(device, Author::Crate, "axb", &format!("{AXB} // no cache"), "", "axb", None).unwrap();
    }
}
