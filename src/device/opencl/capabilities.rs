//! Queries all capabilities of a device from its driver.

use opencl_sys::{self as cl, cl_device_id};

use super::description::{decode_number, text};
use super::discovery;
use super::driver::info;
use crate::Result;
use crate::device::capabilities::{
    Capabilities, FloatSupport, ImageLimits, Platform, SharedVirtualMemory, VectorWidths,
};

/// Returns the capabilities of the device of this index, without opening the device.
pub(crate) fn capabilities(index: usize) -> Result<Capabilities> {
    let found = discovery::description(index)?;
    let id = found.id;
    let number = |what| device_number(id, what);
    let text = |what| info!(clGetDeviceInfo(id, what)).ok().map(|bytes| text(&bytes));
    let extensions = words(&text(cl::CL_DEVICE_EXTENSIONS).unwrap_or_default());
    let has = |name: &str| extensions.iter().any(|extension| extension == name);
    // Queries of an extension are sent only to devices with the extension: other devices may answer nonsense.
    let wave_size = number(cl::CL_DEVICE_PREFERRED_WORK_GROUP_SIZE_MULTIPLE)
        .or_else(|| number(cl::CL_DEVICE_WARP_SIZE_NV).filter(|_| has("cl_nv_device_attribute_query")))
        .or_else(|| number(cl::CL_DEVICE_WAVEFRONT_WIDTH_AMD).filter(|_| has("cl_amd_device_attribute_query")))
        .filter(|&size| size > 0);
    let dot_products = number(cl::CL_DEVICE_INTEGER_DOT_PRODUCT_CAPABILITIES_KHR);
    Ok(Capabilities {
        platform: Some(found.platform_name.clone()),
        version: text(cl::CL_DEVICE_VERSION),
        opencl_c: text(cl::CL_DEVICE_OPENCL_C_VERSION),
        profile: text(cl::CL_DEVICE_PROFILE),
        clock_mhz: number(cl::CL_DEVICE_MAX_CLOCK_FREQUENCY),
        address_bits: number(cl::CL_DEVICE_ADDRESS_BITS),
        cache: number(cl::CL_DEVICE_GLOBAL_MEM_CACHE_SIZE),
        cache_line: number(cl::CL_DEVICE_GLOBAL_MEM_CACHELINE_SIZE),
        wave_size,
        work_item_sizes: numbers(id, cl::CL_DEVICE_MAX_WORK_ITEM_SIZES),
        sub_groups: number(cl::CL_DEVICE_MAX_NUM_SUB_GROUPS),
        local_memory_is_own: number(cl::CL_DEVICE_LOCAL_MEM_TYPE).map(|kind| kind == 1), // CL_LOCAL
        constant_buffer: number(cl::CL_DEVICE_MAX_CONSTANT_BUFFER_SIZE),
        parameter_size: number(cl::CL_DEVICE_MAX_PARAMETER_SIZE),
        vector_widths: VectorWidths {
            char: number(cl::CL_DEVICE_PREFERRED_VECTOR_WIDTH_CHAR),
            int: number(cl::CL_DEVICE_PREFERRED_VECTOR_WIDTH_INT),
            half: number(cl::CL_DEVICE_PREFERRED_VECTOR_WIDTH_HALF),
            float: number(cl::CL_DEVICE_PREFERRED_VECTOR_WIDTH_FLOAT),
            double: number(cl::CL_DEVICE_PREFERRED_VECTOR_WIDTH_DOUBLE),
        },
        half: number(cl::CL_DEVICE_HALF_FP_CONFIG).filter(|_| has("cl_khr_fp16")).and_then(floats),
        single: number(cl::CL_DEVICE_SINGLE_FP_CONFIG).and_then(floats),
        double: number(cl::CL_DEVICE_DOUBLE_FP_CONFIG).and_then(floats),
        svm: number(cl::CL_DEVICE_SVM_CAPABILITIES).map(|bits| SharedVirtualMemory {
            coarse_grain_buffer: bits & 1 != 0,
            fine_grain_buffer: bits & 1 << 1 != 0,
            fine_grain_system: bits & 1 << 2 != 0,
            atomics: bits & 1 << 3 != 0,
        }),
        int8_dot_products: dot_products.filter(|_| has("cl_khr_integer_dot_product")).map(|bits| bits != 0),
        images: number(cl::CL_DEVICE_IMAGE_SUPPORT).filter(|&has| has != 0).map(|_| images(id)),
        profiling_resolution_ns: number(cl::CL_DEVICE_PROFILING_TIMER_RESOLUTION),
        out_of_order_queues: number(cl::CL_DEVICE_QUEUE_ON_HOST_PROPERTIES).map(|bits| bits & 1 != 0),
        extensions,
    })
}

pub(crate) fn platforms() -> Result<Vec<Platform>> {
    let describe = |id| {
        let text = |what| info!(clGetPlatformInfo(id, what)).ok().map(|bytes| text(&bytes));
        Platform {
            name: text(cl::CL_PLATFORM_NAME),
            vendor: text(cl::CL_PLATFORM_VENDOR),
            version: text(cl::CL_PLATFORM_VERSION),
            profile: text(cl::CL_PLATFORM_PROFILE),
            extensions: words(&text(cl::CL_PLATFORM_EXTENSIONS).unwrap_or_default()),
            devices: discovery::device_ids(id).ok().map(|ids| ids.len()),
        }
    };
    Ok(discovery::all_platforms()?.into_iter().map(describe).collect())
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Returns the number, of any width, that a query returns; `None` if the query is refused or empty.
fn device_number(id: cl_device_id, what: u32) -> Option<u64> {
    info!(clGetDeviceInfo(id, what)).ok().filter(|bytes| !bytes.is_empty()).map(|bytes| decode_number(&bytes))
}

/// Returns the list of `size_t` that a query returns.
fn numbers(id: cl_device_id, what: u32) -> Vec<u64> {
    let bytes = info!(clGetDeviceInfo(id, what)).unwrap_or_default();
    bytes.chunks_exact(size_of::<usize>()).map(decode_number).collect()
}

/// Decodes a floating-point configuration; `None` if it is 0, as for an unsupported type.
fn floats(bits: u64) -> Option<FloatSupport> {
    (bits != 0).then_some(FloatSupport {
        denormals: bits & 1 != 0,
        inf_nan: bits & 1 << 1 != 0,
        round_to_nearest: bits & 1 << 2 != 0,
        fma: bits & 1 << 5 != 0,
        correct_division: bits & 1 << 7 != 0,
    })
}

fn images(id: cl_device_id) -> ImageLimits {
    let number = |what| device_number(id, what);
    let sizes = |what: [u32; 3]| Some([number(what[0])?, number(what[1])?, number(what[2])?]);
    ImageLimits {
        size_2d: number(cl::CL_DEVICE_IMAGE2D_MAX_WIDTH)
            .and_then(|width| Some([width, number(cl::CL_DEVICE_IMAGE2D_MAX_HEIGHT)?])),
        size_3d: sizes([
            cl::CL_DEVICE_IMAGE3D_MAX_WIDTH,
            cl::CL_DEVICE_IMAGE3D_MAX_HEIGHT,
            cl::CL_DEVICE_IMAGE3D_MAX_DEPTH,
        ]),
        buffer: number(cl::CL_DEVICE_IMAGE_MAX_BUFFER_SIZE),
        read_arguments: number(cl::CL_DEVICE_MAX_READ_IMAGE_ARGS),
        write_arguments: number(cl::CL_DEVICE_MAX_WRITE_IMAGE_ARGS),
    }
}
