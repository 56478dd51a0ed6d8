//! Checkpoints of all ranks of a job: one file, or a folder with one file for each rank. A rank's elements of a sharded tensor are
//! saved under a name that includes their range.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::Group;
use crate::internal::Excerpt;
use crate::io::{self, StateDict, Stateful, file_error};
use crate::{DType, Device, Error, Result, Tensor};

/// The elements of a sharded tensor that one rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ShardRange {
    /// The range of these elements in the flattened tensor.
    pub elements: Range<usize>,
    /// The shape of the full tensor.
    pub shape: Vec<usize>,
}

impl ShardRange {
    /// Returns the name under which these elements of the tensor `name` are saved, such as `exp_avg[0..5 of 4x3]`.
    pub fn name(&self, name: &str) -> String {
        let dims: Vec<String> = self.shape.iter().map(usize::to_string).collect();
        format!("{name}[{}..{} of {}]", self.elements.start, self.elements.end, dims.join("x"))
    }

    /// Parses a name made by [`name`](Self::name) into the tensor's name and the range of elements.
    fn parse(name: &str) -> Option<(&str, ShardRange)> {
        let (name, piece) = name.strip_suffix(']')?.rsplit_once('[')?;
        let (elements, shape) = piece.split_once(" of ")?;
        let (start, end) = elements.split_once("..")?;
        let elements = start.parse().ok()?..end.parse().ok()?;
        let dims = shape.split('x').filter(|d| !d.is_empty()).map(|d| d.parse().ok());
        Some((name, ShardRange { elements, shape: dims.collect::<Option<_>>()? }))
    }

    /// Returns the name of the tensor to which an entry of a state dict belongs: the name without a range of elements.
    pub fn tensor(name: &str) -> &str {
        ShardRange::parse(name).map_or(name, |(tensor, _)| tensor)
    }

    /// Returns these elements as a flat tensor, from a state that has the full tensor or exactly these elements; `None` if it has neither.
    pub fn slice_from(&self, state: &StateDict, name: &str) -> Result<Option<Tensor>> {
        let Some(whole) = state.get(name) else {
            let none = || Tensor::zeros(0, Device::HOST); // empty pieces are not saved
            let nothing = self.elements.is_empty().then(none).transpose()?;
            return Ok(state.get(&self.name(name)).map(Tensor::detach).or(nothing));
        };
        invalid!("load_state_dict" if whole.shape().dims() != self.shape,
            "{name} has shape {:?} here and {} in the state", self.shape, whole.shape());
        let flat = whole.detach().reshape(whole.numel())?;
        flat.narrow(0, self.elements.start, self.elements.len()).map(Some)
    }
}

/// Concatenates the ranges of each sharded tensor in a state to the full tensor.
fn unshard(state: StateDict) -> Result<StateDict> {
    let (mut whole, mut pieces) = (StateDict::new(), BTreeMap::<String, Vec<(ShardRange, Tensor)>>::new());
    for (name, tensor) in state {
        match ShardRange::parse(&name) {
            Some((of, piece)) => pieces.entry(of.into()).or_default().push((piece, tensor)),
            None => whole.insert(name, tensor),
        }
    }
    for (name, mut pieces) in pieces {
        pieces.sort_by_key(|(piece, _)| piece.elements.start);
        let shape = pieces[0].0.shape.clone();
        let mut end = 0;
        for (piece, tensor) in &pieces {
            let fits = piece.elements.start == end && piece.elements.len() == tensor.numel() && piece.shape == shape;
            end = if fits { piece.elements.end } else { usize::MAX };
        }
        invalid!("load_checkpoint" if shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) != Some(end),
            "some parts of {} are missing: those of at least one rank", Excerpt(&name));
        let parts: Vec<Tensor> = pieces.into_iter().map(|(_, part)| part).collect();
        whole.insert(name, Tensor::cat(&parts, 0)?.reshape(shape)?);
    }
    Ok(whole)
}

/// Waits until all ranks have called this function. Returns an error on every rank if `done` is an error on any rank.
fn agree_on_success<R>(op: &'static str, group: &Group, done: Result<R>) -> Result<R> {
    let failed = Tensor::from_slice(&[u8::from(done.is_err())], 1, Device::HOST)?;
    let all = group.all_gather(&failed)?.to_vec::<u8>()?;
    let done = done?;
    match all.iter().position(|&failed| failed == 1) {
        Some(rank) => Err(Error::Rank { op, rank, reason: "failed: its own error says why".into() }),
        None => Ok(done),
    }
}

/// Saves a checkpoint of all ranks in one file, which rank 0 writes like [`io::save_checkpoint`]. The shards of a
/// [`ZeroRedundancyOptimizer`](super::ZeroRedundancyOptimizer) are saved as one unsharded state, with which a single process can also
/// resume. All other state is saved from rank 0. Must be called on all ranks. Returns when the file is complete. Fails as
/// [`io::save_checkpoint`] does on one rank, and with [`Error::Rank`] on the other ranks.
///
/// ```
/// use claystone::distributed::{self, DataParallel, Group};
/// use claystone::nn::{Linear, Module};
/// use claystone::optim::{Sgd, SgdConfig};
/// # let group = &Group::threads(&[claystone::Device::Cpu])?[0];
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("run.safetensors");
/// let mut model = DataParallel::new(Linear::new(3, 1, group.device())?, group, Default::default())?;
/// let mut sgd = Sgd::new(model.parameters_mut(), SgdConfig::default())?;
/// let mut epoch = 7;
/// distributed::save_checkpoint(&path, group, &[("model", &model), ("optimizer", &sgd), ("epoch", &epoch)])?;
/// distributed::load_checkpoint(&path, &mut [("model", &mut model), ("optimizer", &mut sgd), ("epoch", &mut epoch)])?;
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn save_checkpoint(path: impl AsRef<Path>, group: &Group, parts: &[(&str, &dyn Stateful)]) -> Result<()> {
    let op = "save_checkpoint";
    let state = agree_on_success(op, group, StateDict::from_parts(parts))?;
    let all = gather_at_rank_0(group, state)?;
    let saved = all.map_or(Ok(()), |all| io::save(path, &unshard(all)?));
    agree_on_success(op, group, saved)
}

/// Sends the sharded tensors of all ranks to rank 0. Returns rank 0's state with all of them on rank 0, and `None` on other ranks.
fn gather_at_rank_0(group: &Group, mut state: StateDict) -> Result<Option<StateDict>> {
    let count = |n: usize| Tensor::from_slice(&[n as i64], 1, Device::HOST);
    if group.rank() > 0 {
        let pieces: StateDict = state.into_iter().filter(|(name, _)| ShardRange::parse(name).is_some()).collect();
        let list: Vec<(&str, String)> = pieces.iter().map(|(name, t)| (name, t.dtype().to_string())).collect();
        let list = serde_json::to_vec(&list).expect("names");
        group.send(&count(list.len())?, 0)?;
        group.send(&Tensor::from_slice(&list, list.len(), Device::HOST)?, 0)?;
        pieces.iter().try_for_each(|(_, piece)| group.send(piece, 0))?;
        return Ok(None);
    }
    for rank in 1..group.size() {
        let length = count(0)?;
        group.recv(&length, rank)?;
        let list = Tensor::zeros(length.item::<i64>()? as usize, (DType::U8, Device::HOST))?;
        group.recv(&list, rank)?;
        let wrong = |e| Error::invalid("save_checkpoint", format!("rank {rank} sent an invalid list of names: {e}"));
        let list: Vec<(String, String)> = serde_json::from_slice(&list.to_vec::<u8>()?).map_err(wrong)?;
        for (name, dtype) in list {
            let elements = ShardRange::parse(&name).map_or(0, |(_, piece)| piece.elements.len());
            let piece = Tensor::zeros(elements, (dtype.parse::<DType>()?, Device::HOST))?;
            group.recv(&piece, rank)?;
            state.insert(name, piece);
        }
    }
    let on_host = |(name, t): (String, Tensor)| Ok((name, t.to_device(Device::HOST)?));
    state.into_iter().map(on_host).collect::<Result<_>>().map(Some)
}

/// The file that stores the number of a folder's current checkpoint. A new checkpoint becomes valid when this file is replaced, last.
const INDEX: &str = "index.safetensors";

/// The contents of [`INDEX`]. They determine the names of the ranks' files.
#[derive(Debug, Default)]
struct Index {
    /// The number of checkpoints that were saved in the folder so far.
    generation: u64,
    ranks: usize,
}

impl Index {
    /// Reads the index of a folder. Returns generation 0 if the folder has no index.
    fn read(folder: &Path) -> Result<Index> {
        let (path, mut index) = (folder.join(INDEX), Index::default());
        if path.exists() {
            let Index { generation, ranks } = &mut index;
            io::load_checkpoint(path, &mut [("generation", generation), ("ranks", ranks)])?;
        }
        Ok(index)
    }

    fn write(&self, folder: &Path) -> Result<()> {
        io::save_checkpoint(folder.join(INDEX), &[("generation", &self.generation), ("ranks", &self.ranks)])
    }

    fn file(&self, rank: usize) -> String {
        format!("{}-rank-{rank}-of-{}.safetensors", self.generation, self.ranks)
    }

    /// Removes the files of all other checkpoints in the folder, complete or not.
    fn remove_others(&self, folder: &Path) -> std::io::Result<()> {
        let own: Vec<String> = (0..self.ranks).map(|rank| self.file(rank)).collect();
        for entry in std::fs::read_dir(folder)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if is_shard_file(&name) && !own.contains(&name) {
                std::fs::remove_file(folder.join(name))?;
            }
        }
        Ok(())
    }
}

/// True if a file name has the form of the names that [`Index::file`] returns.
fn is_shard_file(name: &str) -> bool {
    let numbers: Option<Vec<&str>> = name.strip_suffix(".safetensors").and_then(|name| {
        let (generation, rest) = name.split_once("-rank-")?;
        let (rank, ranks) = rest.split_once("-of-")?;
        Some(vec![generation, rank, ranks])
    });
    numbers.is_some_and(|numbers| numbers.iter().all(|n| n.parse::<u64>().is_ok()))
}

/// Saves a checkpoint of all ranks in a folder on a file system that all ranks can access. Every rank writes a file with its shards of each
/// [`ZeroRedundancyOptimizer`](super::ZeroRedundancyOptimizer). Rank 0 also writes all state that is not sharded. Must be called on all
/// ranks. The previous checkpoint stays valid until every file of this checkpoint is complete. Fails as [`io::save_checkpoint`] does on one
/// rank, and with [`Error::Rank`] on the other ranks.
///
/// ```
/// use claystone::distributed::{self, DataParallel, Group, ZeroRedundancyOptimizer};
/// use claystone::nn::Linear;
/// use claystone::optim::{AdamW, AdamWConfig};
/// # let group = &Group::threads(&[claystone::Device::Cpu])?[0];
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path().join("run");
/// let mut model = DataParallel::new(Linear::new(3, 1, group.device())?, group, Default::default())?;
/// let config = AdamWConfig::default();
/// let mut adamw = ZeroRedundancyOptimizer::new(&mut model, |parameters| AdamW::grouped(parameters, |_, _| config))?;
/// distributed::save_sharded_checkpoint(&folder, group, &[("model", &model), ("optimizer", &adamw)])?;
/// // Later, on any number of ranks:
/// distributed::load_checkpoint(&folder, &mut [("model", &mut model), ("optimizer", &mut adamw)])?;
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn save_sharded_checkpoint(folder: impl AsRef<Path>, group: &Group, parts: &[(&str, &dyn Stateful)]) -> Result<()> {
    let (op, folder) = ("save_sharded_checkpoint", folder.as_ref());
    let begun = || {
        std::fs::create_dir_all(folder).map_err(|e| file_error(op, folder, e))?;
        let generation = if group.rank() == 0 { Index::read(folder)?.generation + 1 } else { 0 };
        Ok((StateDict::from_parts(parts)?, Tensor::from_slice(&[generation as i64], 1, Device::HOST)?))
    };
    let (state, generation) = agree_on_success(op, group, begun())?;
    group.broadcast(&generation, 0)?;
    let index = Index { generation: generation.item::<i64>()? as u64, ranks: group.size() };
    let is_own = |name: &str| group.rank() == 0 || ShardRange::parse(name).is_some();
    let own: StateDict = state.into_iter().filter(|(name, _)| is_own(name)).collect();
    agree_on_success(op, group, io::save(folder.join(index.file(group.rank())), &own))?;
    let committed = || {
        index.write(folder)?;
        index.remove_others(folder).map_err(|e| file_error(op, folder, e))
    };
    agree_on_success(op, group, if group.rank() == 0 { committed() } else { Ok(()) })
}

/// Loads a checkpoint of [`save_checkpoint`] or [`save_sharded_checkpoint`], on any number of ranks, or in one process without a group.
/// Every rank reads the whole checkpoint into host memory and keeps its own shards. Fails as [`io::load_checkpoint`] does, and with
/// [`Error::Invalid`] for a folder without a checkpoint, or if elements of a tensor are missing.
pub fn load_checkpoint(path: impl AsRef<Path>, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<()> {
    let (op, path) = ("load_checkpoint", path.as_ref());
    if !path.is_dir() {
        return io::load_checkpoint(path, parts);
    }
    let index = Index::read(path)?;
    if index.ranks == 0 {
        return Err(file_error(op, path, format!("the folder has no {INDEX}, so no checkpoint was completed there")));
    }
    let files: Vec<PathBuf> = (0..index.ranks).map(|rank| path.join(index.file(rank))).collect();
    let mut state = StateDict::new();
    files.iter().try_for_each(|file| io::load(file, Device::HOST).map(|part| state.merge(part)))?;
    unshard(state)?.load_parts(parts).map_err(|e| match e {
        Error::Invalid { reason, .. } => file_error(op, path, reason),
        e => e,
    })
}
