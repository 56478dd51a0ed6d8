//! Programs on every device, from source, from memory and from disk.

use std::fs;

use super::super::cache::seal;
use super::super::tests::{AXB, buffer, contents, devices};
use super::super::{Arg, count, discovery};
use super::*;

fn programs(of: &Programs) -> usize {
    lock(&of.own.0).iter().count() + lock(&of.of_users.0).iter().count()
}

#[test]
fn hidden_instructions_are_opened_or_refused() {
    let ptx = ".version 9.0\n.target sm_90, texmode_independent\n//@ a;\n//@ b;\n// c\n\0";
    let want = ".version 9.0\n.target sm_90a, texmode_independent\na;\nb;\n// c\n\0";
    assert_eq!(open_ptx(ptx.as_bytes()).unwrap(), want);
    for other in
        [".target sm_80\n//@ a;", ".target sm_90\n// a", ".target sm_90a\n//@ a;", ".target sm_900\n//@ a;", ""]
    {
        assert_eq!(open_ptx(other.as_bytes()), None, "{other}");
    }
    assert_eq!(open_ptx(b"\x7fELF\xff"), None);
}

#[test]
fn registers_are_limited_where_the_compiler_can() {
    for device in devices() {
        let source = format!("{MOST_REGISTERS}64\n__kernel void limited(__global int* x) {{ x[0] = MOST_REGISTERS; }}");
        let kernel = device.build("limited", &source, "limited").unwrap();
        let out = buffer(device, &[0; 4]);
        device.launch(&kernel, &[Arg::Buffer(&out)], &[1], &[1]).unwrap();
        assert_eq!(contents(device, &out), 64i32.to_ne_bytes());
    }
}

#[test]
fn programs_come_back_from_disk() {
    for i in 0..count() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("made/on/demand");
        let cache = Cache::at(&dir, 64 << 20);
        let source = format!("__kernel void answer(__global int* x) {{ x[0] = 42; }} // {i}");
        // A device of its own knows no programs, as a new process.
        let fresh = || ClDevice::open(i, discovery::find(i).unwrap()).unwrap();
        let built = |device: &ClDevice| {
            let kernel = device.build_cached(By::Crate, "answer", &source, "", "answer", Some(&cache)).unwrap();
            let out = buffer(device, &[0; 4]);
            device.launch(&kernel, &[Arg::Buffer(&out)], &[1], &[1]).unwrap();
            assert_eq!(contents(device, &out), 42i32.to_ne_bytes());
            device.builds()
        };
        assert_eq!(built(&fresh()), (1, 0), "from source");
        let files: Vec<_> = fs::read_dir(&dir).unwrap().map(|f| f.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "one file, no temporary");
        let whole = fs::read(&files[0]).unwrap();
        assert_eq!(built(&fresh()), (0, 1), "from disk");

        // Cut short, with a flipped bit, empty, and whole but no binary that a driver could take.
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
fn sources_of_the_crate_leave_out_the_header_where_they_can() {
    for i in 0..count() {
        let device = ClDevice::open(i, discovery::find(i).unwrap()).unwrap();
        let built = |by, call: &str, want: f32| {
            let source = format!("__kernel void f(__global float* x) {{ x[get_global_id(0)] = {call}; }} // {i}");
            let kernel = device.build_cached(by, "f", &source, "", "f", None).unwrap();
            let out = buffer(&device, &[0; 4]);
            device.launch(&kernel, &[Arg::Buffer(&out)], &[1], &[1]).unwrap();
            assert_eq!(contents(&device, &out), want.to_ne_bytes(), "{call}");
            (device.builds().0, device.builds_with_header())
        };
        assert_eq!(built(By::Crate, "sqrt(4.0f)", 2.0), (1, 0));
        assert_eq!(built(By::User, "cospi(2.0f)", 1.0), (2, 0));
        assert_eq!(
            built(By::Crate, "cospi(2.0f)", 1.0),
            (2 + 1, u64::from(device.is_pocl())),
            "none of ours calls that"
        );
    }
}

#[test]
fn pocl_is_asked_for_no_binaries_of_the_crates_programs() {
    for i in 0..count() {
        let source = format!("__kernel void f(__global float* x) {{ x[0] = {i}; }} // {}", std::process::id());
        for _ in 0..2 {
            let device = ClDevice::open(i, discovery::find(i).unwrap()).unwrap();
            device.build("f", &source, "f").unwrap();
            if device.is_pocl() {
                assert_eq!((device.builds(), device.programs.slow_binaries.load(Relaxed)), ((1, 0), 0));
            }
        }
    }
}

/// A binary in the place of another one's would compute something else, or nothing.
#[test]
fn binaries_are_not_taken_for_one_another() {
    for i in 0..count() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path(), 64 << 20);
        // A device of its own knows no programs, as a new process.
        let answers = || {
            let device = ClDevice::open(i, discovery::find(i).unwrap()).unwrap();
            let answer = |n: i32| {
                let source = format!("__kernel void answer(__global int* x) {{ x[0] = {n}; }} // {i}");
                let kernel = device.build_cached(By::User, "answer", &source, "", "answer", Some(&cache)).unwrap();
                let out = buffer(&device, &[0; 4]);
                device.launch(&kernel, &[Arg::Buffer(&out)], &[1], &[1]).unwrap();
                contents(&device, &out)[0]
            };
            ([1, 2].map(answer), device.builds())
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

/// Kernels that a program makes, runs and drops, each from a source of its own.
#[test]
fn programs_of_dropped_kernels_are_released() {
    for i in 0..count() {
        let device = ClDevice::open(i, discovery::find(i).unwrap()).unwrap();
        let build = |n: usize| {
            let source = format!("__kernel void number(__global int* x) {{ x[0] = {n}; }}");
            device.build_cached(By::User, "number", &source, "", "number", None).unwrap()
        };
        let held = build(0);
        let first = Arc::downgrade(build(1).program());
        for n in [1, 0] {
            build(n);
        }
        assert_eq!((device.builds(), first.strong_count()), ((2, 0), 1), "made again without the compiler");
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
    // Sources without end, among them the crate's own.
    let all = Programs::default();
    for n in 0..1000u32 {
        let key = |by: u8| std::array::from_fn(|i| if i < 4 { n.to_le_bytes()[i] } else { by });
        all.slot(key(0), By::User);
        all.slot([(n % 10) as u8; 32], By::Crate);
    }
    assert_eq!(programs(&all), MAX_OF_USERS + 10);
}

#[test]
fn a_disk_that_cannot_be_written_stops_nothing() {
    for device in devices() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // A directory inside a file.
        let cache = Cache::at(file.path().join("cache"), 64 << 20);
        device.build_cached(By::Crate, "axb", &format!("{AXB} // no disk"), "", "axb", Some(&cache)).unwrap();
        device.build_cached(By::Crate, "axb", &format!("{AXB} // no cache"), "", "axb", None).unwrap();
    }
}
