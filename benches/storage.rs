//! Times an allocation and a deep clone on every device.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use claystone::{Device, Tensor};

const SIZES: [usize; 3] = [4 << 10, 1 << 20, 64 << 20];

/// Times an allocation from the allocator's cache, and the release of the block.
fn allocate(c: &mut Criterion) {
    for device in Device::all() {
        let mut group = c.benchmark_group(format!("allocate and free/{device}"));
        for bytes in SIZES {
            group.bench_with_input(BenchmarkId::from_parameter(bytes), &bytes, |b, &bytes| {
                b.iter(|| Tensor::empty([bytes / 4], device).expect("the device has room"));
            });
        }
    }
}

fn clone(c: &mut Criterion) {
    for device in Device::all() {
        let mut group = c.benchmark_group(format!("clone/{device}"));
        for bytes in SIZES {
            let tensor = Tensor::zeros([bytes / 4], device).expect("the device has room");
            group.throughput(Throughput::Bytes(2 * bytes as u64));
            group.bench_function(BenchmarkId::from_parameter(bytes), |b| b.iter(|| tensor.clone()));
        }
    }
}

criterion_group!(benches, allocate, clone);
criterion_main!(benches);
