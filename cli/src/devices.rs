//! `claystone devices`: lists the devices.

use std::io::{self, Write};

use claystone::Device;

/// Prints every device; returns false if a device's properties cannot be read.
///
/// # Errors
/// Errors of writing to `out`.
pub fn run(out: &mut impl Write) -> io::Result<bool> {
    let mut good = true;
    for device in Device::all() {
        match device.info() {
            Ok(info) => writeln!(out, "{device}: {}", info.to_string().trim_end())?,
            Err(error) => {
                eprintln!("claystone devices: {device}: {error}");
                good = false;
            }
        }
    }
    Ok(good)
}
