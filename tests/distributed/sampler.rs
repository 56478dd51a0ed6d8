use claystone::data::{DataLoader, DataLoaderConfig, Sampler, TensorDataset};
use claystone::distributed::{DistributedSampler, DistributedSamplerConfig};
use claystone::{DType, Device, Error, Tensor};

use crate::collectives::on_ranks;

/// Returns the indices that each rank draws, for a data set of `items` items.
fn sampled_indices(
    ranks: usize,
    items: usize,
    epoch: u64,
    config: DistributedSamplerConfig,
) -> Vec<(usize, Vec<usize>)> {
    on_ranks(ranks, |group| {
        let sampler = DistributedSampler::new(items, group, config);
        sampler.clone().set_epoch(epoch);
        let own = sampler.indices()?;
        assert_eq!(own.len(), sampler.len());
        // Every rank gathers the indices of all ranks, because ranks may be separate processes.
        let own: Vec<i64> = own.into_iter().map(|i| i as i64).collect();
        let all = group.all_gather(&Tensor::from_slice(&own, own.len(), Device::Cpu)?)?.to_vec::<i64>()?;
        Ok(all.into_iter().map(|i| i as usize).collect())
    })
}

#[test]
fn samplers_split_the_data_set_equally() {
    for (shuffle, drop_last) in [(false, false), (false, true), (true, false), (true, true)] {
        let config = DistributedSamplerConfig { shuffle, drop_last, seed: 5 };
        for (ranks, items) in (1..5).flat_map(|ranks| [0, 1, 3, 8, 10, 23].map(|items: usize| (ranks, items))) {
            let size = if drop_last { items / ranks } else { items.div_ceil(ranks) };
            for (rank, mut all) in sampled_indices(ranks, items, 3, config) {
                assert_eq!(all.len(), size * ranks, "rank {rank} of {ranks}, {items} items");
                all.sort_unstable();
                all.dedup();
                assert_eq!(all.len(), if drop_last { size * ranks } else { items }, "{ranks} ranks, {items} items");
                assert!(all.iter().all(|&i| i < items));
            }
        }
    }
}

#[test]
fn samplers_without_shuffling_match_pytorch() {
    let config = DistributedSamplerConfig { shuffle: false, ..Default::default() };
    // list(DistributedSampler(range(5), num_replicas=2, rank=r, shuffle=False)) is [0, 2, 4] and [1, 3, 0].
    for (_, share) in sampled_indices(2, 5, 0, config) {
        assert_eq!(share, [0, 2, 4, 1, 3, 0]);
    }
    for (_, share) in sampled_indices(2, 5, 0, DistributedSamplerConfig { drop_last: true, ..config }) {
        assert_eq!(share, [0, 2, 1, 3]);
    }
}

#[test]
fn epochs_and_seeds_change_the_order() {
    let config = |seed| DistributedSamplerConfig { seed, ..Default::default() };
    let of = |seed, epoch| sampled_indices(2, 100, epoch, config(seed)).remove(0).1;
    assert_ne!(of(0, 0), of(0, 1));
    assert_ne!(of(0, 0), of(7, 0));
    assert_eq!(of(7, 2), of(7, 2));
}

/// For any number of ranks, the i-th batches of all ranks together must have the items of the i-th batch of a single rank.
#[test]
fn batches_of_all_ranks_equal_those_of_one() {
    let batches = |ranks: usize| -> Vec<Vec<i64>> {
        let mut all = on_ranks(ranks, |group| {
            let set = TensorDataset::new(vec![Tensor::arange(0, 40, 1, (DType::I64, Device::Cpu))?])?;
            let config = DataLoaderConfig { batch_size: 8 / group.size(), num_workers: 2, ..Default::default() };
            let sampler = DistributedSampler::new(40, group, Default::default());
            let loader = DataLoader::new(set, config)?.with_sampler(sampler.clone())?;
            sampler.set_epoch(4);
            assert_eq!(loader.len(), 5);
            loader
                .iter()
                .map(|batch| {
                    let mut together = group.all_gather(&batch?[0])?.to_vec::<i64>()?;
                    together.sort_unstable();
                    Ok(together)
                })
                .collect::<claystone::Result<Vec<_>>>()
        });
        all.pop().map(|(_, batches)| batches).unwrap_or_default()
    };
    let want = batches(1);
    for batches in [batches(2), batches(4)].into_iter().filter(|batches| !batches.is_empty() && !want.is_empty()) {
        assert_eq!(batches, want);
    }
}

#[test]
fn samplers_with_invalid_indices_are_errors() {
    struct Wrong(Vec<usize>, usize);
    impl Sampler for Wrong {
        fn len(&self) -> usize {
            self.1
        }
        fn indices(&self) -> claystone::Result<Vec<usize>> {
            Ok(self.0.clone())
        }
    }
    let set = || TensorDataset::new(vec![Tensor::zeros(3, Device::Cpu).unwrap()]).unwrap();
    let shuffled = DataLoaderConfig { shuffle: true, ..Default::default() };
    let loader = DataLoader::new(set(), shuffled).unwrap();
    assert!(matches!(loader.with_sampler(Wrong(vec![0], 1)), Err(Error::Invalid { .. })));
    for (wrong, sentence) in [
        (Wrong(vec![3], 1), "the sampler returned item 3, but the data set has 3"),
        (Wrong(vec![0, 1], 3), "the sampler returned 2 items, but its len() is 3"),
    ] {
        let loader = DataLoader::new(set(), DataLoaderConfig::default()).unwrap().with_sampler(wrong).unwrap();
        let message = loader.iter().next().expect("an error").unwrap_err().to_string();
        assert!(message.contains(sentence), "{message}");
    }
}
