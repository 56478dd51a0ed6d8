//! Data sets and loaders. Batches and their order must not depend on the number of workers or on the device.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use claystone::data::{Collate, DataLoader, DataLoaderConfig, Dataset, TensorDataset, random_split};
use claystone::{Device, Error, Generator, Result, Tensor};

use crate::common::each_device;

/// A data set of the numbers below `len`, each with a random number. The given indices fail or panic.
struct Numbers {
    len: usize,
    error: Option<usize>,
    panic: Option<usize>,
}

fn numbers(len: usize) -> Numbers {
    Numbers { len, error: None, panic: None }
}

impl Dataset for Numbers {
    type Item = (i64, Tensor);

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> Result<(i64, Tensor)> {
        if self.error == Some(index) {
            return Err(Error::invalid("Numbers", "the file is damaged"));
        }
        assert!(self.panic != Some(index), "{index} is an unlucky number");
        Ok((index as i64, Tensor::rand(2, Device::Cpu)?))
    }
}

fn config(batch_size: usize, num_workers: usize) -> DataLoaderConfig {
    DataLoaderConfig { batch_size, num_workers, ..Default::default() }
}

/// Returns the numbers of each batch, and the bits of their random numbers.
fn collect(loader: &DataLoader<(Tensor, Tensor)>) -> Vec<(Vec<i64>, Vec<u32>)> {
    let bits = |t: Tensor| t.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
    let batch = |b: Result<(Tensor, Tensor)>| b.map(|(n, t)| (n.to_vec::<i64>().unwrap(), bits(t))).unwrap();
    loader.iter().map(batch).collect()
}

#[test]
fn batches_do_not_depend_on_the_number_of_workers() {
    for shuffle in [false, true] {
        let passes = |num_workers: usize| {
            let generator = Some(Generator::new(9));
            let config = DataLoaderConfig { shuffle, generator, prefetch_factor: 1, ..config(7, num_workers) };
            let loader = DataLoader::new(numbers(50), config).unwrap();
            [collect(&loader), collect(&loader)]
        };
        let [first, second] = passes(0);
        let order = |pass: &[(Vec<i64>, Vec<u32>)]| pass.iter().flat_map(|(n, _)| n.clone()).collect::<Vec<i64>>();
        let sizes: Vec<usize> = first.iter().map(|(n, _)| n.len()).collect();
        assert_eq!(sizes, [7, 7, 7, 7, 7, 7, 7, 1]);
        let mut sorted = order(&first);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<i64>>());
        assert_eq!(order(&first) == sorted, !shuffle);
        assert_eq!(order(&first) == order(&second), !shuffle, "each pass has an order of its own");
        let random = |pass: &[(Vec<i64>, Vec<u32>)]| pass.iter().map(|(_, bits)| bits.clone()).collect::<Vec<_>>();
        assert_ne!(random(&first), random(&second), "and draws of its own");
        for workers in [1, 3, 16] {
            assert!(passes(workers) == [first.clone(), second.clone()], "{workers} workers, shuffle {shuffle}");
        }
    }
}

#[test]
fn passes_can_be_repeated_from_the_generators_state() {
    let generator = Generator::new(4);
    let config =
        DataLoaderConfig { shuffle: true, generator: Some(generator.clone()), drop_last: true, ..config(8, 2) };
    let loader = DataLoader::new(numbers(30), config).unwrap();
    collect(&loader);
    let state = generator.state();
    let pass = collect(&loader);
    assert_eq!((pass.len(), loader.len(), loader.iter().len()), (3, 3, 3), "the last two items are left out");
    generator.set_state(state);
    assert!(collect(&loader) == pass);
}

#[test]
fn errors_and_panics_replace_their_batches() {
    for workers in [0, 1, 4] {
        let set = Numbers { error: Some(5), panic: Some(9), ..numbers(14) };
        let batches: Vec<_> = DataLoader::new(set, config(2, workers)).unwrap().iter().collect();
        assert_eq!(batches.len(), 7);
        for (i, batch) in batches.into_iter().enumerate() {
            match (i, batch) {
                (2, Err(e)) => assert_eq!(e.to_string(), "Numbers: the file is damaged (item 5 of the data set)"),
                (4, Err(e)) => {
                    let want = "DataLoader: the data set panicked in batch 4: 9 is an unlucky number";
                    assert_eq!(e.to_string(), want, "{workers} workers");
                }
                (_, batch) => assert_eq!(batch.unwrap().0.to_vec::<i64>().unwrap(), [2 * i as i64, 2 * i as i64 + 1]),
            }
        }
    }
    let none = DataLoader::new(numbers(3), config(0, 0)).err().unwrap().to_string();
    assert_eq!(none, "DataLoader: batch_size is 0: a batch needs at least one item");
    assert_eq!(DataLoader::new(numbers(0), config(3, 2)).unwrap().iter().count(), 0);
}

/// A data set that reports every requested item, and fails for items too far ahead of the consumer.
struct Watched {
    asked: Mutex<Sender<usize>>,
    taken: Arc<AtomicUsize>,
    ahead: usize,
}

impl Dataset for Watched {
    type Item = i64;

    fn len(&self) -> usize {
        100
    }

    fn get(&self, index: usize) -> Result<i64> {
        let taken = self.taken.load(Ordering::SeqCst);
        if index > taken + self.ahead {
            return Err(Error::invalid("Watched", format!("{index} is asked for when {taken} were taken")));
        }
        self.asked.lock().unwrap().send(index).unwrap();
        Ok(index as i64)
    }
}

#[test]
fn workers_prefetch_a_bounded_number_and_end_with_the_pass() {
    let (asked, asks) = channel();
    let taken = Arc::new(AtomicUsize::new(0));
    let set = Arc::new(Watched { asked: Mutex::new(asked), taken: taken.clone(), ahead: 6 });
    let config = DataLoaderConfig { prefetch_factor: 3, ..config(1, 2) };
    let loader = DataLoader::new(set.clone(), config).unwrap();
    let mut batches = loader.iter();
    // Six items must be requested before the consumer takes the first. If the workers request fewer, this line waits forever.
    let mut ahead: Vec<usize> = (0..6).map(|_| asks.recv().unwrap()).collect();
    ahead.sort_unstable();
    assert_eq!(ahead, [0, 1, 2, 3, 4, 5]);
    for want in 0..50 {
        assert_eq!(batches.next().unwrap().unwrap().to_vec::<i64>().unwrap(), [want]);
        taken.fetch_add(1, Ordering::SeqCst);
    }
    drop(batches);
    drop(loader);
    assert_eq!(Arc::strong_count(&set), 1, "no worker is left");
    let most = asks.try_iter().max().unwrap();
    assert!(most < 50 + 6, "{most}");
}

#[test]
fn batches_are_uploaded_while_the_device_computes() {
    each_device(|device| {
        let (rows, columns) = (96, 4096);
        let values: Vec<f32> = (0..rows * columns).map(|i| (i % 1021) as f32).collect();
        let set = || {
            let x = Tensor::from_slice(&values, [rows, columns], Device::Cpu).unwrap();
            let label = Tensor::from_slice(&(0..rows as i64).collect::<Vec<_>>(), rows, Device::Cpu).unwrap();
            TensorDataset::new(vec![x, label]).unwrap()
        };
        for workers in [0, 2] {
            let loader = DataLoader::new(set(), config(8, workers)).unwrap().to_device(device).unwrap();
            let mut sums = Vec::new();
            for (i, batch) in loader.iter().enumerate() {
                let [x, labels] = &batch.unwrap()[..] else { panic!("two tensors") };
                assert_eq!((x.device(), labels.device(), x.shape().dims()), (device, device, &[8, columns][..]));
                // A later batch may get the memory of a dropped batch only after these kernels have run.
                sums.push((x.mul_scalar(2.0).unwrap().sum(1, false).unwrap(), labels.add_scalar(1).unwrap(), i));
            }
            for (sum, labels, i) in sums {
                let row = |r: usize| {
                    values[(8 * i + r) * columns..][..columns].iter().map(|x| 2.0 * f64::from(*x)).sum::<f64>()
                };
                let sum = sum.to_vec::<f32>().unwrap();
                for (r, got) in sum.iter().enumerate() {
                    assert!((f64::from(*got) / row(r) - 1.0).abs() < 1e-5, "row {r} of batch {i} on {device}");
                }
                let want: Vec<i64> = (8 * i as i64 + 1..).take(8).collect();
                assert_eq!(labels.to_vec::<i64>().unwrap(), want, "batch {i} on {device}");
            }
        }
    });
}

#[test]
fn random_splits_are_complete_and_repeatable() {
    let split = |seed| {
        let parts = random_split(numbers(20), &[12, 5, 3], &Generator::new(seed)).unwrap();
        let items = |d: &dyn Fn(usize) -> i64, n: usize| (0..n).map(d).collect::<Vec<i64>>();
        parts.iter().map(|p| items(&|i| p.get(i).unwrap().0, p.len())).collect::<Vec<_>>()
    };
    let parts = split(5);
    assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [12, 5, 3]);
    let mut all = parts.concat();
    all.sort_unstable();
    assert_eq!(all, (0..20).collect::<Vec<i64>>());
    assert!(split(5) == parts && split(6) != parts);
    let error = random_split(numbers(20), &[12, 5], &Generator::new(1)).err().unwrap().to_string();
    assert_eq!(error, "random_split: the lengths [12, 5] add up to 17, but the set has 20 items");
}

#[test]
fn items_of_different_shapes_are_errors() {
    let zeros = |n: usize| Tensor::zeros(n, Device::Cpu).unwrap();
    assert!(matches!(Collate::collate(vec![zeros(2), zeros(3)]), Err(Error::ShapeMismatch { op: "stack", .. })));
    let error = Collate::collate(vec![vec![1i64, 2], vec![3]]).err().unwrap().to_string();
    assert_eq!(error, "collate: items have 2 and 1 parts: give all the same number, or use with_collate");
    let (a, b, c) = Collate::collate(vec![(1u8, true, 0.5f32), (2, false, 1.5)]).unwrap();
    assert_eq!(a.to_vec::<u8>().unwrap(), [1, 2]);
    assert_eq!((b.to_vec::<bool>().unwrap(), c.to_vec::<f32>().unwrap()), (vec![true, false], vec![0.5, 1.5]));
    assert!(TensorDataset::new(vec![zeros(2), zeros(3)]).is_err() && TensorDataset::new(vec![]).is_err());
}
