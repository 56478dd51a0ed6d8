//! Devices by number.

use claystone::Device;

use crate::memory::ClaystoneBytes;
use crate::pointers::output;
use crate::status::{ClaystoneStatus, Fault, guard};

/// The number of the CPU device, which is always there. OpenCL devices have the numbers from 0 on.
pub const CLAYSTONE_CPU: i32 = -1;

/// The device of this number, whether it is there or not.
pub(crate) fn device(number: i32) -> Result<Device, Fault> {
    match usize::try_from(number) {
        Ok(index) => Ok(Device::OpenCL(index)),
        Err(_) if number == CLAYSTONE_CPU => Ok(Device::Cpu),
        Err(_) => {
            Err(Fault::Argument(format!("{number} is no device: OpenCL's are 0 and above, the CPU is {CLAYSTONE_CPU}")))
        }
    }
}

/// The number of this device.
pub(crate) fn number(device: Device) -> i32 {
    match device {
        Device::Cpu => CLAYSTONE_CPU,
        Device::OpenCL(index) => i32::try_from(index).unwrap_or(i32::MAX),
    }
}

/// How many OpenCL devices there are: their numbers are 0 and above, as long as the process lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_device_count(count: *mut i32) -> ClaystoneStatus {
    guard("claystone_device_count", || {
        // SAFETY: good for writing, says the caller.
        let count = unsafe { output(count, "count")? };
        count.write(Device::all().iter().filter(|&&device| device != Device::Cpu).count() as i32);
        Ok(())
    })
}

/// The name of a device: its model. The text is the caller's, to be given to `claystone_bytes_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_device_name(number: i32, name: *mut ClaystoneBytes) -> ClaystoneStatus {
    guard("claystone_device_name", || {
        // SAFETY: good for writing, says the caller.
        let name = unsafe { output(name, "name")? };
        name.write(ClaystoneBytes::new(device(number)?.info()?.name.into_bytes()));
        Ok(())
    })
}

/// The memory of a device in bytes; 0 where it could not be found out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_device_memory(number: i32, bytes: *mut u64) -> ClaystoneStatus {
    guard("claystone_device_memory", || {
        // SAFETY: good for writing, says the caller.
        let bytes = unsafe { output(bytes, "bytes")? };
        bytes.write(device(number)?.info()?.memory);
        Ok(())
    })
}

/// Whether a device is there and has not been lost to a fault. Opens nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_device_is_available(number: i32, available: *mut bool) -> ClaystoneStatus {
    guard("claystone_device_is_available", || {
        // SAFETY: good for writing, says the caller.
        let available = unsafe { output(available, "available")? };
        available.write(device(number)?.is_available());
        Ok(())
    })
}

/// From now on, whichever thread waits next is told what kernels found wrong, and not the thread that launched them: for programs whose
/// threads hand work on. Call it before the first operation.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_report_faults_to_any_thread() {
    claystone::device::report_faults_to_any_thread();
}

/// Waits until everything submitted to a device so far, on every stream, is done. Reports what kernels found wrong meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_device_synchronize(number: i32) -> ClaystoneStatus {
    guard("claystone_device_synchronize", || Ok(device(number)?.synchronize()?))
}
