//! Tests of the events that a profile records.

use std::collections::HashSet;
use std::process::Command;

use claystone::device::count_launches;
use claystone::profiler::{Category, Event, Lane, Profile, Profiler, ProfilerOptions, profile};
use claystone::storage::{MemoryMode, annotate, with_context, with_memory_mode};
use claystone::{ConvOptions, DType, Device, Error, Graph, Kernel, Stream, Tensor, with_stream};

use crate::common::devices;
use crate::{serial_guard, train};

fn events_of(profile: &Profile, category: Category) -> Vec<&Event> {
    profile.events().iter().filter(|event| event.category == category).collect()
}

/// Returns the number of launches of operations. On OpenCL devices these are kernels except those that copy or fill memory.
fn count_launch_events(profile: &Profile, device: Device) -> usize {
    let category = if device == Device::Cpu { Category::Operation } else { Category::Kernel };
    let is_launch = |event: &&&Event| event.device == Some(device) && &*event.name != "memory";
    events_of(profile, category).iter().filter(is_launch).count()
}

#[test]
fn every_launch_is_recorded_without_changing_results() {
    let _guard = serial_guard();
    for device in devices() {
        // The mode keeps buffers: conversions to images are recorded, but they are not launches of operations.
        let train = || with_memory_mode(MemoryMode::Buffer, || train(device, 10).unwrap());
        let (plain, counted) = count_launches(train);
        let (loss, recorded) = profile(train).unwrap();
        assert_eq!(loss, plain, "{device}");
        assert_eq!(count_launch_events(&recorded, device) as u64, counted, "{device}");
        assert_eq!(train(), plain, "{device}: after the profile");
        assert_eq!(recorded.dropped_events(), 0);
    }
}

#[test]
fn commands_have_ordered_times_and_arrows_from_launches() {
    let _guard = serial_guard();
    for device in devices().into_iter().filter(|&d| d != Device::Cpu) {
        let (_, recorded) = profile(|| train(device, 3).unwrap()).unwrap();
        let commands: Vec<&Event> = recorded.events().iter().filter(|e| e.category.is_command()).collect();
        let kernels = commands.iter().filter(|e| e.category == Category::Kernel).count();
        let reads = commands.iter().filter(|e| e.category == Category::Read).count();
        assert!(kernels > 20 && reads >= 3, "{kernels} kernels, {reads} reads");
        let mut numbers = HashSet::new();
        for command in commands {
            let [queued, submitted] = command.queued_us.expect("a command of a device has times");
            assert!(queued <= submitted && submitted <= command.start_us && command.duration_us >= 0.0, "{command:?}");
            assert!(matches!(command.lane, Lane::Stream(on, 0) if on == device));
            assert!(numbers.insert(command.launch), "each has a launch of its own");
            let launch =
                recorded.events().iter().find(|e| e.category == Category::Launch && e.launch == command.launch);
            let launch = launch.expect("each has a launch");
            assert_eq!((&launch.name, launch.device), (&command.name, Some(device)));
            assert!(matches!(launch.lane, Lane::Thread(_)));
        }
        assert!(!events_of(&recorded, Category::Wait).is_empty(), "the host waited for the losses");
    }
}

#[test]
fn depthwise_convolutions_and_gradients_are_recorded() {
    let _guard = serial_guard();
    for device in devices() {
        let leaf = |shape: &[usize]| Tensor::ones(shape, device).unwrap().requires_grad_(true).unwrap();
        let (x, weight) = (leaf(&[2, 3, 6, 7]), leaf(&[3, 1, 3, 3]));
        let options = ConvOptions { groups: 3, ..ConvOptions::default() };
        let convolve = || x.conv2d(&weight, None, options).unwrap().sum((), false).unwrap().backward().unwrap();
        let ((), recorded) = profile(|| with_memory_mode(MemoryMode::Buffer, convolve)).unwrap();
        for name in ["conv2d", "conv_transpose2d", "conv2d weight gradient"] {
            let named = |e: &&&Event| &*e.name == name;
            assert_eq!(events_of(&recorded, Category::Operation).iter().filter(named).count(), 1, "{name} on {device}");
        }
    }
}

#[test]
fn operations_have_shapes_dtypes_bytes_and_flops() {
    let _guard = serial_guard();
    for device in devices() {
        let (_, recorded) = profile(|| {
            let (a, b) = (Tensor::ones(&[3, 5], device).unwrap(), Tensor::ones(&[5, 7], device).unwrap());
            let product = with_memory_mode(MemoryMode::Buffer, || a.matmul(&b).unwrap()); // launches exactly one kernel
            product.add(&Tensor::ones(7, device).unwrap()).unwrap().exp().unwrap().sum(1, false).unwrap()
        })
        .unwrap();
        let find = |name: &str| {
            let named = |e: &&Event| e.category == Category::Operation && &*e.name == name;
            recorded.events().iter().find(named).unwrap_or_else(|| panic!("no {name} on {device}"))
        };
        let product = find("matmul").operation.clone().unwrap();
        assert_eq!(product.shapes, [vec![3, 5], vec![5, 7], vec![3, 7]]);
        assert_eq!(product.dtype, Some(DType::F32));
        assert_eq!((find("matmul").bytes, find("matmul").flops), (4 * (15 + 35 + 21), 2 * 3 * 5 * 7));
        assert_eq!(find("add").operation.as_ref().unwrap().shapes, [vec![3, 7], vec![7], vec![3, 7]]);
        assert_eq!((find("add").bytes, find("add").flops), (4 * (21 + 7 + 21), 0));
        assert_eq!(find("sum").operation.as_ref().unwrap().shapes, [vec![3, 7], vec![3]]);
        assert_eq!(find("exp").device, Some(device));
        if device != Device::Cpu {
            let of_product = |e: &&Event| e.category == Category::Kernel && e.operation.as_ref() == Some(&product);
            let kernels: Vec<&Event> = recorded.events().iter().filter(of_product).collect();
            assert_eq!(kernels.len(), 1, "the product's kernel carries its operation");
            assert_eq!((kernels[0].bytes, kernels[0].flops), (find("matmul").bytes, 2 * 3 * 5 * 7));
        }
    }
}

#[test]
fn transfers_copies_and_fills_have_bytes() {
    let _guard = serial_guard();
    for device in devices() {
        let (_, recorded) = profile(|| {
            let x = Tensor::from_slice(&[1.5f32; 1000], 1000, device).unwrap();
            x.fill_(2.0).unwrap();
            let copy = x.clone();
            copy.to_vec::<f32>().unwrap()
        })
        .unwrap();
        for category in [Category::Copy, Category::Read] {
            let bytes: u64 = events_of(&recorded, category).iter().map(|e| e.bytes).sum();
            assert_eq!(bytes, 4000, "{category:?} on {device}");
        }
    }
}

#[test]
fn annotations_are_spans_and_label_inner_events() {
    let _guard = serial_guard();
    for device in devices() {
        let x = Tensor::ones(8, device).unwrap();
        let (_, recorded) = profile(|| {
            annotate("step", || with_context("layer 1", || x.sqrt().unwrap()));
            x.exp().unwrap()
        })
        .unwrap();
        let spans = events_of(&recorded, Category::Annotation);
        assert_eq!(spans.iter().map(|e| &*e.name).collect::<Vec<_>>(), ["step"]);
        let of_name = |name: &str| recorded.events().iter().find(|e| &*e.name == name).unwrap();
        assert_eq!(&*of_name("exp").annotation, "");
        let inside = &of_name("sqrt").annotation;
        assert_eq!(&**inside, "step/layer 1");
        let sqrt = of_name("sqrt");
        assert!(spans[0].start_us <= sqrt.start_us);
        let end = |e: &Event| e.start_us + e.duration_us;
        assert!(end(sqrt) <= end(spans[0]) || device != Device::Cpu);
    }
}

#[test]
fn gradients_have_their_own_spans() {
    let _guard = serial_guard();
    let x = Tensor::ones(&[4, 4], Device::Cpu).unwrap().requires_grad_(true).unwrap();
    let y = x.matmul(&x).unwrap().sum((), false).unwrap();
    let (_, recorded) = profile(|| y.backward().unwrap()).unwrap();
    let backward = events_of(&recorded, Category::Backward);
    assert_eq!(backward.iter().map(|e| &*e.name).collect::<Vec<_>>(), ["sum", "matmul"]);
}

#[test]
fn threads_and_streams_have_lanes() {
    let _guard = serial_guard();
    for device in devices() {
        let (_, recorded) = profile(|| {
            let worker = std::thread::Builder::new().name("worker".into());
            worker.spawn(move || Tensor::ones(4, device).unwrap().exp().unwrap()).unwrap().join().unwrap();
            let side = Stream::new(device).unwrap();
            with_stream(&side, || Tensor::ones(4, device).unwrap().exp().unwrap());
        })
        .unwrap();
        assert!(recorded.threads().iter().any(|(_, name)| name == "worker"), "{:?}", recorded.threads());
        let lanes: HashSet<Lane> = recorded.events().iter().map(|e| e.lane).collect();
        let threads = lanes.iter().filter(|lane| matches!(lane, Lane::Thread(_))).count();
        assert_eq!(threads, 2);
        if device != Device::Cpu {
            let streams = lanes.iter().filter(|lane| matches!(lane, Lane::Stream(..))).count();
            assert_eq!(streams, 2, "{lanes:?}");
        }
    }
}

#[test]
fn memory_samples_match_the_statistics() {
    let _guard = serial_guard();
    for device in devices() {
        let held = Tensor::zeros(1000, device).unwrap();
        let (kept, recorded) = profile(|| {
            drop(Tensor::zeros(5000, device).unwrap());
            Tensor::zeros(3 << 20, device).unwrap()
        })
        .unwrap();
        let samples: Vec<_> = recorded.memory().iter().filter(|s| s.device == device).collect();
        let last = samples.last().expect("there were allocations");
        let stats = device.memory_stats().unwrap();
        assert_eq!(last.allocated, stats.allocated_bytes.current, "{device}");
        assert_eq!(last.reserved, stats.reserved_bytes.current, "{device}");
        assert!(samples.windows(2).all(|pair| pair[0].time_us <= pair[1].time_us));
        drop((held, kept));
    }
}

#[test]
fn program_builds_and_segments_are_recorded() {
    let _guard = serial_guard();
    for device in devices().into_iter().filter(|&d| d != Device::Cpu) {
        // The source contains the time, so that no program cache has it.
        let unique = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        let source = format!("__kernel void once(__global float *x) {{ x[get_global_id(0)] = 1; }} // {unique}");
        let (_, recorded) = profile(|| {
            let once = Kernel::from_source("once", source, "").unwrap();
            let x = Tensor::zeros(64, device).unwrap();
            // SAFETY: the kernel writes the 64 elements of `x`, which is passed as `out`.
            unsafe { once.call().out(&x).global(&[64]).launch().unwrap() };
            assert_eq!(x.to_vec::<f32>().unwrap(), [1.0; 64]);
            drop(Tensor::zeros(40 << 20, device).unwrap());
        })
        .unwrap();
        // The program is built twice: as given, and with offsets into its buffers.
        assert_eq!(events_of(&recorded, Category::Compile).len(), 2, "{device}");
        assert!(events_of(&recorded, Category::Segment).iter().any(|e| e.bytes >= 160 << 20), "{device}");
    }
}

#[test]
fn replayed_graphs_are_recorded() {
    let _guard = serial_guard();
    for device in devices().into_iter().filter(|&d| d != Device::Cpu) {
        let x = Tensor::ones(100, device).unwrap();
        let (graph, y) = Graph::capture(device, || x.exp()?.add_scalar(1.0)).unwrap();
        let (_, counted) = count_launches(|| graph.replay().unwrap());
        let (_, recorded) = profile(|| graph.replay().unwrap()).unwrap();
        assert_eq!(count_launch_events(&recorded, device) as u64, counted);
        assert_eq!(y.to_vec::<f32>().unwrap(), [1f32.exp() + 1.0; 100]);
    }
}

#[test]
fn profiling_does_not_consume_kernel_faults() {
    let _guard = serial_guard();
    for device in devices().into_iter().filter(|&d| d != Device::Cpu) {
        let x = Tensor::ones(4, device).unwrap();
        let beyond = Tensor::from_slice(&[9i64], 1, device).unwrap();
        let profiler = Profiler::start().unwrap();
        let _taken = x.take(&beyond).unwrap();
        let recorded = profiler.stop();
        assert!(count_launch_events(&recorded, device) > 0);
        let message = device.synchronize();
        assert!(matches!(message, Err(Error::IndexOutOfRange { index: 9, size: 4, .. })), "{message:?}");
    }
}

#[test]
fn events_begun_before_a_profile_are_not_in_it() {
    let _guard = serial_guard();
    let (_, first) = profile(|| {
        annotate("outside", || {
            let inner = profile(|| ());
            assert!(inner.is_err(), "one at a time");
        })
    })
    .unwrap();
    assert_eq!(events_of(&first, Category::Annotation).len(), 1);
    let mut profiler = Some(Profiler::start().unwrap());
    let second = annotate("from one to the next", || {
        drop(profiler.take());
        let second = Profiler::start().unwrap();
        Tensor::ones(4, Device::Cpu).unwrap().exp().unwrap();
        second
    });
    let recorded = second.stop();
    assert!(events_of(&recorded, Category::Annotation).is_empty());
    assert!(recorded.events().iter().all(|event| event.start_us >= 0.0));
}

#[test]
fn only_the_latest_events_are_kept() {
    let _guard = serial_guard();
    let options = ProfilerOptions::default().max_events(10).copy_rate(false);
    let profiler = Profiler::start_with(options).unwrap();
    let x = Tensor::ones(4, Device::Cpu).unwrap();
    (0..50).for_each(|_| drop(x.exp().unwrap()));
    x.sqrt().unwrap();
    let recorded = profiler.stop();
    assert!(recorded.events().len() <= 10 && recorded.dropped_events() > 40);
    assert!(recorded.events().iter().any(|e| &*e.name == "sqrt"), "the last is there");
    assert!(recorded.devices().iter().all(|of| of.copy_bytes_per_s.is_none()) || recorded.devices().len() == 1);
}

#[test]
fn only_one_profiler_can_run() {
    let _guard = serial_guard();
    let first = Profiler::start().unwrap();
    let refused = Profiler::start().unwrap_err().to_string();
    assert!(refused.contains("stop it first"), "{refused}");
    drop(first);
    let recorded = Profiler::start().unwrap().stop();
    assert!(recorded.events().is_empty(), "{:?}", recorded.events());
}

/// The body of the child process of the tests below. Without `CLAYSTONE_PROFILE` it does nothing.
#[test]
fn profiled_child_process() {
    if std::env::var_os("CLAYSTONE_PROFILE").is_some() {
        let devices = devices();
        // This is the first use of each device, which also measures the device's copy rate.
        for &device in devices.iter().filter(|&&device| device != Device::Cpu) {
            let (graph, y) = Graph::capture(device, || Tensor::ones(100, device)?.exp()).unwrap();
            graph.replay().unwrap();
            assert_eq!(y.to_vec::<f32>().unwrap(), [1f32.exp(); 100]);
        }
        devices.into_iter().for_each(|device| _ = train(device, 2).unwrap());
        assert!(Profiler::start().is_err(), "the environment's profile is under way");
    }
}

#[test]
fn the_environment_variable_profiles_a_whole_program() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "recording::profiled_child_process"]).env("CLAYSTONE_PROFILE", &file);
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let recorded = Profile::load(&file).unwrap();
    for device in devices() {
        assert!(count_launch_events(&recorded, device) > 10, "{device}");
        let opened = recorded.events().iter().filter(|e| e.category == Category::Open && e.device == Some(device));
        assert_eq!(opened.count(), usize::from(device != Device::Cpu), "{device}");
        let known = recorded.devices().iter().find(|of| of.device == device).unwrap();
        assert!(known.copy_bytes_per_s.is_some_and(|rate| rate > 1e6), "{known:?}");
    }
}

#[test]
fn unwritable_profiles_are_reported_without_failing_the_program() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "recording::profiled_child_process"]).env("CLAYSTONE_PROFILE", "/no/such/folder/trace.json");
    let output = child.output().unwrap();
    assert!(output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("CLAYSTONE_PROFILE was not written"), "{said}");
}
