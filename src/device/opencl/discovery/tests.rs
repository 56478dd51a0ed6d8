use super::super::description::{text, unusable_reason, version};
use super::*;

fn names() -> Vec<((usize, usize), String)> {
    vec![
        ((1, 0), "NVIDIA H200 NVIDIA Corporation NVIDIA CUDA".into()),
        ((0, 0), "pthread-Xeon GenuineIntel Portable Computing Language".into()),
        ((0, 1), "basic GenuineIntel Portable Computing Language".into()),
    ]
}

#[test]
fn devices_are_selected_by_index_and_by_name() {
    let pick = |choice| Choice::parse(choice).select(&names());
    assert_eq!(pick("").0, [0, 1, 2]);
    assert_eq!(pick(" , ").0, [0, 1, 2]);
    assert_eq!(pick("0:1").0, [2]);
    assert_eq!(pick("0:1, h200").0, [2, 0]);
    assert_eq!(pick("portable").0, [1, 2]);
    assert_eq!(pick("basic,Portable,0:0").0, [2, 1], "each device once, where it was first named");
    assert_eq!(pick("0:7,xyz,basic"), (vec![2], vec!["0:7".to_owned(), "xyz".to_owned()]));
    assert!(pick("none").0.is_empty());
}

#[test]
fn only_index_entries_ignore_failures_of_other_devices() {
    let asks = |choice: &str| {
        let choice = Choice::parse(choice);
        [choice.depends_on(0, None), choice.depends_on(0, Some(1)), choice.depends_on(1, None), choice.has_names()]
    };
    assert_eq!(asks(""), [true, true, true, false]);
    assert_eq!(asks("0:0"), [true, false, false, false]);
    assert_eq!(asks("1:0, 0:1"), [true, true, true, false]);
    assert_eq!(asks("1:0,pocl"), [true, true, true, true]);
}

#[test]
fn discrete_gpus_come_before_integrated_gpus_and_cpus() {
    use DeviceKind::*;
    let mut kinds = [Cpu, Accelerator, IntegratedGpu, DiscreteGpu];
    kinds.sort_by_key(|&k| rank(k));
    assert_eq!(kinds, [DiscreteGpu, IntegratedGpu, Accelerator, Cpu]);
}

#[test]
fn errors_name_the_searched_library_and_what_to_install() {
    for message in [no_library("cannot open", Some("/nonexistent")), no_driver("CL_PLATFORM_NOT_FOUND_KHR")] {
        for part in [opencl_libraries(OS)[0], install_hint(OS)] {
            assert!(message.contains(part), "{message}");
        }
    }
    assert!(no_library("x", Some("/nonexistent")).contains("/nonexistent"));
}

#[test]
fn devices_too_small_for_kernels_say_why() {
    assert_eq!([unusable_reason(32, 16 << 10), unusable_reason(1024, 48 << 10)], [None, None]);
    assert_eq!(unusable_reason(31, 0).unwrap(), "has work-groups of 31 work-items, and kernels need 32");
    assert_eq!(unusable_reason(32, (16 << 10) - 1).unwrap(), "has 16383 bytes of local memory, and kernels need 16384");
}

#[test]
fn driver_strings_are_trimmed_and_versions_parsed() {
    assert_eq!(text(b"  a b \0"), "a b");
    assert_eq!(version("1.2 PoCL"), Some((1, 2)));
    assert_eq!(version("3.0"), Some((3, 0)));
    assert_eq!(version("x"), None);
}
