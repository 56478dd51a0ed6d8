//! Dry runs: the estimate of a program's memory must equal the statistics of a real run.

use claystone::nn::{Conv2d, Linear, Module};
use claystone::ops::Attention;
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use claystone::storage::{self, Role};
use claystone::{DType, Device, Graph, Result, Tensor, no_grad};

use super::common::{each_device, in_child_with, in_own_process, opencl};

/// Two training steps of a small convolutional network, whose sizes exceed those of the allocator's small pool.
fn train(device: Device, steps: usize) -> Result<f32> {
    let conv = Conv2d::new(3, 16, [3, 3], Default::default(), device)?;
    let mut head = Linear::new(16 * 30 * 30, 100, device)?;
    let mut conv = conv;
    let parameters = conv.parameters_mut().into_iter().chain(head.parameters_mut()).collect();
    let mut adamw = AdamW::new(parameters, AdamWConfig::default())?;
    let labels = Tensor::from_slice(&[3i64; 64], 64, device)?;
    let mut last = 0.0;
    for _ in 0..steps {
        let x = Tensor::randn([64, 3, 32, 32], device)?;
        let loss = head.forward(&conv.forward(&x)?.relu()?.flatten(1, -1)?)?.cross_entropy(&labels)?;
        loss.backward()?;
        adamw.step()?;
        adamw.zero_grad();
        last = loss.item()?;
    }
    let guess = no_grad(|| head.forward(&Tensor::ones([8, 16 * 30 * 30], device)?)?.argmax(1, false))?;
    assert_eq!(guess.to_vec::<i64>()?.len(), 8);
    Ok(last)
}

/// Returns the peaks of allocated and reserved bytes.
fn peaks(device: Device) -> [u64; 2] {
    let stats = device.memory_stats().unwrap();
    [stats.allocated_bytes.peak, stats.reserved_bytes.peak]
}

#[test]
fn estimates_equal_real_runs() {
    if !in_own_process("estimate::estimates_equal_real_runs") {
        return;
    }
    each_device(|device| {
        device.reset_peak_stats().unwrap();
        let before = peaks(device);
        let (done, estimate) = storage::dry_run(Some(1 << 40), || train(device, 3)).unwrap();
        assert_eq!(done.unwrap(), 0.0);
        assert_eq!(peaks(device), before, "a dry run takes no memory of {device}");
        train(device, 3).unwrap();
        let of = estimate.devices.iter().find(|of| of.device == device).unwrap();
        assert_eq!([of.peak_allocated, of.peak_reserved], peaks(device), "on {device}:\n{estimate}");
        device.empty_cache().unwrap();

        assert_eq!(of.roles.iter().map(|(_, bytes)| bytes).sum::<u64>(), of.peak_allocated);
        assert_eq!(of.sites.iter().map(|site| site.bytes).sum::<u64>(), of.peak_allocated);
        let weights = 4 * (16 * 27 + 16 + 16 * 30 * 30 * 100 + 100) as u64;
        for (role, copies) in [(Role::Parameter, 1), (Role::Gradient, 1), (Role::OptimizerState, 2)] {
            let (_, bytes) = of.roles.iter().find(|(of, _)| *of == role).unwrap();
            let rounding = 512 * copies;
            assert!((copies * weights..=copies * weights + rounding).contains(bytes), "{role:?}: {bytes}");
        }
        assert!(of.sites.iter().any(|site| site.frames[0].filename.ends_with("estimate.rs")), "{estimate}");
        let item = estimate.assumed.iter().find(|assumed| assumed.what == "item").unwrap();
        assert_eq!((item.count, item.largest), (3, false));
        assert!(of.fits == Some(true) && of.failed_at.is_none() && estimate.to_string().contains("fits in 1.00 TiB"));
    });
}

/// A real allocator with the estimated memory must serve the program, and one with 1 % less must not.
#[test]
fn the_smallest_device_suffices_and_a_smaller_one_does_not() {
    if !in_own_process("estimate::the_smallest_device_suffices_and_a_smaller_one_does_not") {
        return;
    }
    each_device(|device| {
        let (_, estimate) = storage::dry_run(Some(1 << 20), || train(device, 2)).unwrap();
        let of = estimate.devices.iter().find(|of| of.device == device).unwrap();
        let failed = of.failed_at.as_ref().unwrap();
        assert!(of.fits == Some(false) && failed.filename.ends_with("estimate.rs"), "{estimate}");
        device.set_memory_limit(of.smallest_device).unwrap();
        train(device, 2).unwrap();
        device.empty_cache().unwrap();
        device.set_memory_limit(of.smallest_device / 100 * 99).unwrap();
        assert!(train(device, 2).is_err(), "{estimate}");
    });
}

#[test]
fn sizes_that_depend_on_values_are_the_largest_and_named() {
    each_device(|device| {
        let step = || -> Result<[usize; 4]> {
            let x = Tensor::randn([1000, 100], device)?;
            let positive = x.gt_scalar(0)?;
            let host = Tensor::from_slice(&[2i64, 0, 3], 3, device)?;
            let repeated = Tensor::ones(3, device)?.repeat_interleave_tensor(&host, 0)?;
            let drawn = x.softmax(1)?.multinomial(2, false)?;
            assert_eq!(drawn.shape().dims(), [1000, 2]);
            assert_eq!(host.to_vec::<i64>()?, [2, 0, 3]);
            host.add_scalar_(1)?;
            let computed = if device == Device::Cpu { [3, 1, 4] } else { [0; 3] };
            assert_eq!(host.to_vec::<i64>()?, computed, "few values are computed on the CPU, none on OpenCL");
            Ok([x.masked_select(&positive)?, positive.nonzero()?, x.unique()?, repeated].map(|t| t.shape().dims()[0]))
        };
        let (sizes, estimate) = storage::dry_run(None, step).unwrap();
        assert_eq!(sizes.unwrap(), [100_000, 100_000, 100_000, 5]);
        let named = |what: &str| estimate.assumed.iter().any(|a| a.what == what && a.largest && a.site.is_some());
        assert!(named("nonzero") && named("unique"), "{estimate}");
    });
}

/// The body of the child process of the test below. Without `CLAYSTONE_DRY_RUN` it does nothing.
#[test]
fn dry_child_process() {
    if std::env::var_os("CLAYSTONE_DRY_RUN").is_none() {
        return;
    }
    let device = std::env::var("ESTIMATE_DEVICE").unwrap().parse().unwrap();
    train(device, 1).unwrap();
    device.reset_peak_stats().unwrap();
    if device != Device::Cpu {
        let x = Tensor::ones(1 << 20, device).unwrap();
        let (graph, y) = Graph::capture(device, || x.exp()?.add(&x)?.sum((), false)).unwrap();
        graph.replay().unwrap();
        assert_eq!(y.item::<f32>().unwrap(), 0.0);
    }
    let other = std::thread::spawn(move || train(device, 1).is_ok());
    assert!(other.join().unwrap());
}

#[test]
fn the_environment_variable_estimates_a_whole_program() {
    each_device(|device| {
        let folder = tempfile::tempdir().unwrap();
        let [json, snapshot] = ["report.json", "memory.pickle"].map(|name| folder.path().join(name));
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "estimate::dry_child_process"]).env("CLAYSTONE_DRY_RUN", "64MiB");
        child.env("CLAYSTONE_DRY_RUN_JSON", &json).env("CLAYSTONE_DRY_RUN_SNAPSHOT", &snapshot);
        let output = child.env("ESTIMATE_DEVICE", device.to_string()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stdout));
        assert!(said.contains("does not fit in 64.00 MiB") || said.contains("fits in 64.00 MiB"), "{said}");
        let report: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        let of = report["devices"].as_array().unwrap().iter().find(|of| of["device"] == device.to_string()).unwrap();
        let (done, estimate) = storage::dry_run(None, || train(device, 1)).unwrap();
        done.unwrap();
        assert!(of["peak_allocated"].as_u64().unwrap() >= estimate.devices[0].peak_allocated);
        let snapshot = storage::Snapshot::load(&snapshot).unwrap();
        snapshot.check().unwrap();
        let peak = snapshot.peak_memory().into_iter().map(|peak| peak.bytes).max().unwrap();
        assert_eq!(Some(peak), of["peak_requested"].as_u64());
    });
}

/// A training step of a transformer with 7 billion parameters in bf16, on the CPU device.
fn step_of_seven_billion() -> Result<()> {
    let at = (DType::BF16, Device::Cpu);
    let (width, inner, layers, words, tokens) = (4096, 11008, 32, 32000, 2048);
    let linear = |from: usize, to: usize| Tensor::randn([to, from], at)?.requires_grad_(true);
    let mut all = vec![Tensor::randn([words, width], at)?.requires_grad_(true)?, linear(width, words)?];
    for _ in 0..layers {
        for (from, to) in [(width, width); 4].into_iter().chain([(width, inner), (width, inner), (inner, width)]) {
            all.push(linear(from, to)?);
        }
    }
    let mut adamw = AdamW::new(all.iter_mut().collect(), AdamWConfig::default())?;
    let index = Tensor::zeros(tokens, (DType::I64, Device::Cpu))?;
    let mut x = all[0].index_select(0, &index)?;
    for layer in all[2..].chunks(7) {
        let heads = |w: &Tensor| x.matmul(&w.t()?)?.reshape([1, tokens, 32, width / 32])?.transpose(1, 2);
        let (q, k, v) = (heads(&layer[0])?, heads(&layer[1])?, heads(&layer[2])?);
        let attended = q.scaled_dot_product_attention(&k, &v, Attention { is_causal: true, ..Default::default() })?;
        let attended = attended.transpose(1, 2)?.reshape([tokens, width])?;
        x = x.add(&attended.matmul(&layer[3].t()?)?)?;
        let gate = x.matmul(&layer[4].t()?)?.silu()?.mul(&x.matmul(&layer[5].t()?)?)?;
        x = x.add(&gate.matmul(&layer[6].t()?)?)?;
    }
    x.matmul(&all[1].t()?)?.cross_entropy(&index)?.backward()?;
    adamw.step()
}

/// Returns the largest resident memory of this process so far, in bytes.
#[cfg(target_os = "linux")]
fn peak_resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10
}

#[cfg(target_os = "linux")]
#[test]
fn seven_billion_parameters_are_estimated_in_little_memory() {
    if !in_child_with("estimate::seven_billion_parameters_are_estimated_in_little_memory", "CLAYSTONE_DEVICES", "none")
    {
        return;
    }
    let begun = std::time::Instant::now();
    let (done, estimate) = storage::dry_run(Some(80 << 30), step_of_seven_billion).unwrap();
    done.unwrap();
    let cpu = &estimate.devices[0];
    println!("{estimate}in {:?}", begun.elapsed());
    // 2 bytes each for the parameter and its gradient, 12 for the master weights and AdamW's two averages.
    let parameters = 2 * 32000 * 4096 + 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008);
    let [(_, weights), (_, gradients), (_, states), ..] = cpu.roles;
    for (bytes, each) in [(weights, 2), (gradients, 2), (states, 12)] {
        assert!((each * parameters..each * parameters + 4096).contains(&bytes), "{bytes}");
    }
    assert!(cpu.fits == Some(false) && cpu.peak_allocated > 16 * parameters);
    assert!(peak_resident_bytes() < 1 << 30, "{} bytes are resident", peak_resident_bytes());
}

#[test]
fn simulated_tensors_are_not_handed_to_other_code() {
    each_device(|device| {
        let (x, _) = storage::dry_run(None, || Tensor::ones([3, 3], device)).unwrap();
        let x = x.unwrap();
        assert!(x.storage().export_cl().is_err());
        assert_eq!(x.matmul(&Tensor::ones([3, 3], device).unwrap()).unwrap().shape().dims(), [3, 3]);
        assert!(Tensor::ones(3, device).unwrap().to_vec::<f32>().unwrap() == [1.0; 3], "real tensors still compute");
    });
    assert_eq!(opencl().filter(|device| device.synchronize().is_err()).count(), 0);
}
