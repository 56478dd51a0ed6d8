//! Non-blocking copies. tests/faults/non_blocking.rs tests copies that a faulty driver delays.

use claystone::{Device, Error, Graph, Stream, Tensor, with_stream};

use crate::common::{devices, opencl, vec};

fn pinned(values: &[f32], device: Device) -> Tensor {
    Tensor::from_slice(values, values.len(), Device::Cpu).unwrap().pin_memory(device).unwrap()
}

#[test]
fn non_blocking_copies_transfer_the_values() {
    for device in devices() {
        let x = Tensor::zeros([3, 4], device).unwrap();
        let host = Tensor::arange(0, 12, 1, Device::Cpu).unwrap().pin_memory(device).unwrap();
        let before = x.storage().version();
        x.copy_non_blocking_(&host.reshape([3, 4]).unwrap()).unwrap();
        assert!(x.storage().version() > before);
        assert_eq!(vec(&x), (0..12).map(|i| i as f32).collect::<Vec<_>>());
        // Copies to a part of the pinned memory.
        let twice = x.mul_scalar(2).unwrap();
        let second = twice.narrow(0, 1, 1).unwrap().contiguous().unwrap().reshape(4).unwrap();
        host.narrow(0, 8, 4).unwrap().copy_non_blocking_(&second).unwrap();
        assert_eq!(vec(&host), [0., 1., 2., 3., 4., 5., 6., 7., 8., 10., 12., 14.]);
        // Copies from memory that is not pinned, within one device, and of empty tensors work like copy_.
        let ordinary = Tensor::full([3, 4], 7, Device::Cpu).unwrap();
        x.copy_non_blocking_(&ordinary).unwrap();
        ordinary.copy_non_blocking_(&twice).unwrap();
        assert_eq!((vec(&x), vec(&ordinary)), (vec![7.0; 12], vec(&twice)));
        x.t().unwrap().copy_non_blocking_(&Tensor::ones(3, device).unwrap()).unwrap();
        assert_eq!(vec(&x), [1.0; 12]);
        let none = Tensor::zeros(0, device).unwrap();
        none.copy_non_blocking_(&pinned(&[], device)).unwrap();
        none.write_bytes_non_blocking_(&[]).unwrap();
        // The caller may change its bytes as soon as the call returns. The bytes are in row-major order, whatever the tensor's
        // strides are.
        let mut bytes: Vec<u8> = (0..12).flat_map(|i| (i as f32).to_ne_bytes()).collect();
        x.write_bytes_non_blocking_(&bytes).unwrap();
        bytes.fill(0);
        assert_eq!(vec(&x)[1..3], [1.0, 2.0]);
        x.t().unwrap().write_bytes_non_blocking_(&[1, 0, 0, 0].repeat(12)).unwrap();
        assert_eq!(vec(&x), [f32::from_bits(1); 12]);
        assert!(matches!(x.write_bytes_non_blocking_(&[0; 3]), Err(Error::Invalid { .. })));
    }
}

#[test]
fn non_blocking_copies_have_gradients() {
    for device in devices() {
        let source = pinned(&[1.0, 2.0], device).requires_grad_(true).unwrap();
        let x = Tensor::zeros(2, device).unwrap();
        x.copy_non_blocking_(&source).unwrap();
        x.mul_scalar(3).unwrap().sum((), false).unwrap().backward().unwrap();
        assert_eq!(vec(&source.grad().unwrap()), [3.0, 3.0]);
    }
}

/// Copies on several streams that use the same pinned memory are ordered.
#[test]
fn streams_that_share_pinned_memory_are_ordered() {
    for device in opencl() {
        let streams = [Stream::new(device).unwrap(), Stream::new(device).unwrap()];
        let shared = pinned(&[0.0; 4096], device);
        let mut x = Tensor::zeros(4096, device).unwrap();
        device.synchronize().unwrap();
        for i in 0..20 {
            let stream = &streams[i % 2];
            x = with_stream(stream, || {
                let there = Tensor::zeros(4096, device)?;
                there.copy_non_blocking_(&shared)?;
                there.add_scalar_(1)?;
                shared.copy_non_blocking_(&there)?;
                Ok::<_, Error>(there)
            })
            .unwrap();
        }
        assert_eq!(vec(&shared), [20.0; 4096]);
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
        assert_eq!(vec(&x), [20.0; 4096]);
    }
}

#[test]
fn graphs_refuse_copies_from_the_host() {
    for device in opencl() {
        let (x, host) = (Tensor::zeros(8, device).unwrap(), pinned(&[1.0; 8], device));
        let refused = |f: &dyn Fn() -> claystone::Result<()>| {
            let error = Graph::capture(device, f).unwrap_err();
            assert!(error.to_string().contains("captur"), "{error}");
        };
        refused(&|| x.copy_non_blocking_(&host).map(drop));
        refused(&|| host.copy_non_blocking_(&x).map(drop));
        refused(&|| x.write_bytes_non_blocking_(&[0; 32]).map(drop));
        assert_eq!((vec(&x), vec(&host)), (vec![0.0; 8], vec![1.0; 8]));
    }
}
