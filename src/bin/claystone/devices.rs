//! `claystone devices`: what there is to run on.

use std::io::{self, Write};

use claystone::Device;

/// Prints every device; false where one could not be asked.
///
/// # Errors
/// Those of writing.
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
