//! The device-dependent numbers compiled into kernels: one table, with a default for each family of devices.

/// A family of devices with the same defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Processor,
    /// A processor with 32 vector registers of 64 bytes, rather than 16 of 32 bytes, as detected on the host.
    WideProcessor,
    Gpu,
}

const PROCESSORS: &[Family] = &[Family::Processor, Family::WideProcessor];
const GPUS: &[Family] = &[Family::Gpu];
pub(super) const ALL: &[Family] = &[Family::Processor, Family::WideProcessor, Family::Gpu];

#[derive(Debug)]
pub(crate) struct ParameterRow {
    pub(crate) knob: TuningParameter,
    pub(crate) name: &'static str,
    pub(crate) doc: &'static str,
    pub(crate) families: &'static [Family],
    /// The allowed values. Every value gives correct results on every device; only the speed differs.
    pub(crate) choices: &'static [usize],
    defaults: [usize; 3],
}

/// Defines [`TuningParameter`] and [`PARAMETERS`] from rows of `TuningParameter "name" families choices defaults "description";`.
macro_rules! parameters {
    ($($knob:ident $name:literal $families:ident $choices:tt $defaults:tt $doc:literal;)*) => {
        /// A tunable parameter, which is the index of its row in [`PARAMETERS`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum TuningParameter {
            $($knob,)*
        }

        pub(crate) const PARAMETERS: &[ParameterRow; [$(TuningParameter::$knob),*].len()] = &[$(ParameterRow {
            knob: TuningParameter::$knob,
            name: $name,
            doc: $doc,
            families: $families,
            choices: &$choices,
            defaults: $defaults,
        },)*];
    };
}

parameters! {
    MapGroup "map_group" ALL [64, 128, 256, 512, 1024] [256, 256, 256] "work-items a group of elementwise kernels";
    MapLoads "map_loads" GPUS [1, 2, 4, 8] [1, 1, 4]
        "elements a work-item of elementwise kernels whose operands are not aligned";
    TransposeTile "transpose_tile" GPUS [32, 64] [64, 64, 64] "side of the tiles of transposed operands in local memory";
    TransposeLine "transpose_line" PROCESSORS [8, 16] [16, 16, 16] "side of the tiles of transposed operands in private memory";
    PanelRows "panel_rows" PROCESSORS [4, 6, 8] [6, 8, 6] "rows of a matrix product in registers";
    PanelVectors "panel_vectors" PROCESSORS [1, 2] [1, 2, 1] "vectors of 64 bytes in each of these rows";
    PanelDepth "panel_depth" PROCESSORS [128, 256, 512] [256, 128, 256]
        "rows of the right matrix that are multiplied at a time";
    PanelBlock "panel_block" PROCESSORS [96, 192, 384] [192, 192, 192]
        "rows of the left matrix that a work-item multiplies with them";
    DotSide "dot_side" PROCESSORS [2, 4] [2, 4, 2]
        "rows and columns of a work-item where both matrices are contiguous along the inner dimension";
    ConvolutionImages "convolution_images" ALL [0, 1] [0, 0, 0] "1 where convolutions read images, with memory:auto";
    PoolingImages "pooling_images" ALL [0, 1] [0, 0, 0] "1 where pooling reads images, with memory:auto";
    ProductImages "product_images" ALL [0, 1] [0, 0, 0] "1 where matrix products read images, with memory:auto";
    ElementwiseImages "elementwise_images" ALL [0, 1] [0, 0, 0] "1 where elementwise kernels read images, with memory:auto";
    Tile "tile" GPUS [32, 64, 128] [128, 128, 128] "side of the largest tile of a matrix product without tensor cores";
    MmaColumns "mma_columns" GPUS [64, 128, 256] [256, 256, 256]
        "columns of the widest tile of a matrix product or convolution on tensor cores";
    ThinGroups "thin_groups" GPUS [1, 2, 4, 8] [4, 4, 4]
        "work-groups a compute unit that share the depth of a product with a matrix of few rows";
    AttentionRows "attention_rows" GPUS [8, 16, 32, 64] [64, 64, 64]
        "rows of the largest tile of attention without tensor cores";
    DepthwiseColumns "depthwise_columns" GPUS [1, 2, 4, 8] [4, 4, 4]
        "neighbouring results of a work-item in depthwise convolutions";
    SortItems "sort_items" GPUS [8, 16, 32] [16, 16, 16] "elements that a work-item sorts by digits, in registers";
}

/// The value of every parameter, in the order of [`PARAMETERS`].
pub(super) type Values = [usize; PARAMETERS.len()];

impl ParameterRow {
    pub(crate) fn default(&self, family: Family) -> usize {
        self.defaults[family as usize]
    }
}

pub(super) fn defaults(family: Family) -> Values {
    std::array::from_fn(|i| PARAMETERS[i].default(family))
}

/// Returns the rows that kernels of this family use, with their indices.
pub(super) fn rows(family: Family) -> impl Iterator<Item = (usize, &'static ParameterRow)> {
    PARAMETERS.iter().enumerate().filter(move |(_, p)| p.families.contains(&family))
}
