//! Devices by number.

use claystone::Device;

use crate::memory::ClaystoneBytes;
use crate::pointers::output;
use crate::status::{ClaystoneStatus, Fault, guard};

/// The number of the CPU device, which always exists. OpenCL devices are numbered from 0.
pub const CLAYSTONE_CPU: i32 = -1;

/// Converts a device number. Does not check that the device exists.
pub(crate) fn device(number: i32) -> Result<Device, Fault> {
    match usize::try_from(number) {
        Ok(index) => Ok(Device::OpenCL(index)),
        Err(_) if number == CLAYSTONE_CPU => Ok(Device::Cpu),
        Err(_) => Err(Fault::Argument(format!(
            "{number} is not a device: OpenCL's are 0 and above, the CPU is {CLAYSTONE_CPU}"
        ))),
    }
}

/// Returns the number of a device in the C API.
pub(crate) fn number(device: Device) -> i32 {
    match device {
        Device::Cpu => CLAYSTONE_CPU,
        Device::OpenCL(index) => i32::try_from(index).unwrap_or(i32::MAX),
        _ => i32::MIN, // a kind that this version of the C API does not know
    }
}

/// The number of OpenCL devices. Device numbers start at 0 and do not change while the process lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_device_count(count: *mut i32) -> ClaystoneStatus {
    guard("claystone_device_count", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let count = unsafe { output(count, "count")? };
        count.write(Device::all().iter().filter(|&&device| device != Device::Cpu).count() as i32);
        Ok(())
    })
}

/// The model name of a device. The caller owns the string and frees it with `claystone_bytes_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_device_name(number: i32, name: *mut ClaystoneBytes) -> ClaystoneStatus {
    guard("claystone_device_name", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let name = unsafe { output(name, "name")? };
        name.write(ClaystoneBytes::new(device(number)?.info()?.name.into_bytes()));
        Ok(())
    })
}

/// The memory of a device in bytes; 0 if unknown.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_device_memory(number: i32, bytes: *mut u64) -> ClaystoneStatus {
    guard("claystone_device_memory", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let bytes = unsafe { output(bytes, "bytes")? };
        bytes.write(device(number)?.info()?.memory);
        Ok(())
    })
}

/// Gets whether a device exists and has not been lost to a fault. Does not open the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_device_is_available(number: i32, available: *mut bool) -> ClaystoneStatus {
    guard("claystone_device_is_available", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let available = unsafe { output(available, "available")? };
        available.write(device(number)?.is_available());
        Ok(())
    })
}

/// Makes the next thread that waits receive errors reported by kernels, instead of the thread that launched them: for programs whose
/// threads pass work to each other. Call it before the first operation.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_report_faults_to_any_thread() {
    claystone::device::report_faults_to_any_thread();
}

/// Waits until all work submitted to a device so far, on every stream, is complete. Returns errors that kernels reported meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_device_synchronize(number: i32) -> ClaystoneStatus {
    guard("claystone_device_synchronize", || Ok(device(number)?.synchronize()?))
}
