//! Sums, gaps and tables of profiles whose numbers are known.

use claystone::Device;
use claystone::profiler::{Average, Category, Profile, SortBy};

/// A profile with two kernels of one operation, a copy, and nested host events.
const TRACE: &str = r#"{"displayTimeUnit":"ns",
 "otherData":{"claystone":"0.1.0","duration_us":200.0,"dropped_events":3,
  "devices":[{"device":"opencl:0","name":"Some GPU","pid":1,"copy_bytes_per_s":1e9}]},
 "traceEvents":[
 {"ph":"M","name":"thread_name","pid":0,"tid":4,"args":{"name":"main"}},
 {"ph":"X","cat":"annotation","name":"step","pid":0,"tid":4,"ts":0,"dur":100,"args":{}},
 {"ph":"X","cat":"operation","name":"matmul","pid":0,"tid":4,"ts":10,"dur":20,"args":{"device":"opencl:0","operation":"matmul","shapes":[[2,3],[3,4],[2,4]],"dtype":"f32","bytes":104,"flops":48}},
 {"ph":"X","cat":"launch","name":"gemm","pid":0,"tid":4,"ts":12,"dur":5,"args":{"device":"opencl:0","launch":1}},
 {"ph":"X","cat":"launch","name":"gemm","pid":0,"tid":4,"ts":20,"dur":5,"args":{"device":"opencl:0","launch":2}},
 {"ph":"X","cat":"kernel","name":"gemm","pid":1,"tid":0,"ts":20,"dur":30,"args":{"device":"opencl:0","launch":1,"operation":"matmul","shapes":[[2,3],[3,4],[2,4]],"dtype":"f32","bytes":104,"flops":48,"queued_us":13,"submitted_us":15}},
 {"ph":"X","cat":"kernel","name":"gemm","pid":1,"tid":0,"ts":55,"dur":10,"args":{"device":"opencl:0","launch":2,"operation":"matmul","shapes":[[2,3],[3,4],[2,4]],"dtype":"f32","bytes":104,"flops":48,"queued_us":21,"submitted_us":22}},
 {"ph":"X","cat":"copy","name":"clEnqueueCopyBuffer","pid":1,"tid":0,"ts":100,"dur":10,"args":{"device":"opencl:0","bytes":5000,"launch":3}},
 {"ph":"X","cat":"wait","name":"clFinish","pid":0,"tid":4,"ts":110,"dur":40,"args":{"device":"opencl:0"}},
 {"ph":"X","cat":"compile","name":"gemm","pid":0,"tid":4,"ts":160,"dur":25,"args":{"device":"opencl:0"}},
 {"ph":"C","name":"memory opencl:0","pid":1,"ts":30,"args":{"allocated":100,"reserved":2000}}
 ]}"#;

fn row<'a>(rows: &'a [Average], category: Category, name: &str) -> &'a Average {
    let found = rows.iter().find(|row| row.category == category && &*row.name == name);
    found.unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn times_are_summed_by_name_and_category() {
    let profile = Profile::from_bytes(TRACE.as_bytes()).unwrap();
    let averages = profile.key_averages();
    assert_eq!(averages.device_us(), 50.0);
    let kernel = row(averages.rows(), Category::Kernel, "gemm");
    assert_eq!((kernel.calls, kernel.device_us, kernel.bytes, kernel.flops), (2, 40.0, 208, 96));
    assert_eq!(kernel.flops_per_s(), Some(96.0 / 40e-6));
    let operation = row(averages.rows(), Category::Operation, "matmul");
    assert_eq!((operation.calls, operation.host_self_us, operation.host_total_us), (1, 10.0, 20.0));
    assert_eq!(operation.device_us, 40.0, "that of its kernels");
    let launch = row(averages.rows(), Category::Launch, "gemm");
    assert_eq!((launch.calls, launch.host_self_us, launch.device_us), (2, 10.0, 0.0));
    assert_eq!(row(averages.rows(), Category::Annotation, "step").host_self_us, 80.0);
    let copy = row(averages.rows(), Category::Copy, "clEnqueueCopyBuffer");
    assert_eq!(copy.bytes_per_s(), Some(5e8));
    assert_eq!(copy.share_of_copy_rate(), Some(0.5));
}

#[test]
fn gaps_between_launches_are_counted() {
    let gaps = Profile::from_bytes(TRACE.as_bytes()).unwrap().gaps();
    let [gap] = gaps[..] else { panic!("one device: {gaps:?}") };
    assert_eq!(gap.device, Device::OpenCL(0));
    assert_eq!((gap.span_us, gap.busy_us, gap.idle_us), (90.0, 50.0, 40.0));
    assert_eq!((gap.count, gap.longest_us), (2, 35.0));
}

#[test]
fn rows_are_sorted_and_limited() {
    let averages = Profile::from_bytes(TRACE.as_bytes()).unwrap().key_averages();
    let first = |by| averages.clone().sorted_by(by).rows()[0].name.to_string();
    assert_eq!(first(SortBy::HostTime), "step");
    assert_eq!(first(SortBy::Bytes), "clEnqueueCopyBuffer");
    assert_eq!(first(SortBy::Calls), "gemm");
    assert_eq!(first(SortBy::Name), "clEnqueueCopyBuffer");
    let table = averages.limited_to(2).to_string();
    assert!(table.contains("... and 5 more"), "{table}");
    assert!("width".parse::<SortBy>().is_err());
}

#[test]
fn the_table_lists_devices_waits_and_programs() {
    let profile = Profile::from_bytes(TRACE.as_bytes()).unwrap();
    let table = profile.key_averages().to_string();
    for part in [
        "200.0 us from start to stop",
        "opencl:0 (Some GPU): busy for 50.0 us of 90.0 us (56%); 2 gaps of 40.0 us in all, the longest 35.0 us; copies 1.0 GB/s",
        "1 waits of the host: 40.0 us",
        "1 programs compiled: 25.0 us",
        "3 older events did not fit",
    ] {
        assert!(table.contains(part), "{part} is not in\n{table}");
    }
    let by_shape = profile.key_averages_by_shape().to_string();
    assert!(by_shape.contains("gemm [[2, 3], [3, 4], [2, 4]]"), "{by_shape}");
}

#[test]
fn timings_print_every_command() {
    let timings = Profile::from_bytes(TRACE.as_bytes()).unwrap().timings().to_string();
    let lines: Vec<&str> = timings.lines().collect();
    assert_eq!(lines.len(), 4, "{timings}");
    assert!(lines[0].contains("gemm (matmul)"));
    assert!(lines[0].ends_with("queued       2.0, submitted       5.0, run      30.0"), "{}", lines[0]);
    assert_eq!(lines[3], "total time: 50.0 us");
}
