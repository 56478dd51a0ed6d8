//! Times `a + b` on every device, and in ndarray on the host.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ndarray::Array1;

use claystone::{Device, Tensor};

fn add(c: &mut Criterion) {
    let mut group = c.benchmark_group("add");
    for n in [10_000, 1_000_000, 10_000_000] {
        group.throughput(Throughput::Bytes(12 * n as u64));
        let (x, y) = (Array1::<f32>::ones(n), Array1::<f32>::ones(n));
        group.bench_function(BenchmarkId::new("ndarray", n), |b| b.iter(|| &x + &y));
        for device in Device::all() {
            let ones = || Tensor::ones([n], device).expect("the device has room");
            let (x, y) = (ones(), ones());
            group.bench_function(BenchmarkId::new(device.to_string(), n), |b| {
                b.iter(|| {
                    let sum = &x + &y;
                    device.synchronize().expect("the device runs");
                    sum
                });
            });
        }
    }
}

criterion_group!(benches, add);
criterion_main!(benches);
