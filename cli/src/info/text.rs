//! Prints the report for people.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Value;

use super::report::{DeviceReport, Report, ValueSource};

pub fn write(report: &Report, out: &mut impl Write) -> io::Result<()> {
    heading(out, "claystone")?;
    fields(out, &report.claystone)?;
    heading(out, "host")?;
    fields(out, &report.host)?;
    heading(out, "OpenCL")?;
    let opencl = &report.opencl;
    line(out, "libraries", &opencl.libraries.join(", "))?;
    line(out, "icd files", &opencl.icd_files.join(", "))?;
    error(out, opencl.error.as_deref())?;
    for platform in &opencl.platforms {
        heading(out, "OpenCL platform")?;
        fields(out, platform)?;
    }
    report.devices.iter().try_for_each(|device| write_device(device, out))?;
    heading(out, "configuration")?;
    for variable in &report.configuration.environment {
        let note = if variable.known { "" } else { " (unknown: nothing reads it)" };
        let value = variable.value.as_deref().unwrap_or("not set");
        line(out, &variable.name, &format!("{value}{note}"))?;
    }
    error(out, report.configuration.error.as_deref())?;
    for key in &report.configuration.allocator {
        let source = if key.source == ValueSource::Environment { " (environment)" } else { "" };
        line(out, key.key, &format!("{}{source}", key.value))?;
    }
    heading(out, "cache")?;
    let cache = &report.cache;
    line(out, "folder", cache.folder.as_deref().unwrap_or("none"))?;
    for (kind, files) in &cache.files {
        line(out, kind, &format!("{} of {} bytes", files.count, files.bytes))?;
    }
    error(out, cache.error.as_deref())
}

fn write_device(device: &DeviceReport, out: &mut impl Write) -> io::Result<()> {
    heading(out, &device.device)?;
    error(out, device.error.as_deref())?;
    if let Some(info) = &device.info {
        fields(out, info)?;
    }
    if let Some(capabilities) = &device.capabilities {
        fields(out, capabilities)?;
    }
    for outcome in &device.self_test {
        let result = match &outcome.error {
            None => format!("passed ({:.1} ms)", outcome.milliseconds),
            Some(error) => format!("FAILED: {error}"),
        };
        line(out, &format!("self-test {}", outcome.name), &result)?;
    }
    Ok(())
}

fn heading(out: &mut impl Write, title: &str) -> io::Result<()> {
    writeln!(out, "{title}")
}

fn line(out: &mut impl Write, name: &str, value: &str) -> io::Result<()> {
    writeln!(out, "  {name:<30} {value}")
}

fn error(out: &mut impl Write, error: Option<&str>) -> io::Result<()> {
    error.map_or(Ok(()), |error| line(out, "ERROR", error))
}

/// Prints a line for each field that is not null.
fn fields(out: &mut impl Write, of: &impl Serialize) -> io::Result<()> {
    let Value::Object(fields) = serde_json::to_value(of).map_err(io::Error::other)? else { return Ok(()) };
    fields
        .iter()
        .filter(|(_, value)| !value.is_null())
        .try_for_each(|(name, value)| line(out, name, &format_value(value)))
}

/// Formats a value, for example as `yes`, `a, b`, or `denormals yes, fma no`.
fn format_value(value: &Value) -> String {
    match value {
        Value::Null => "unknown".to_owned(),
        Value::Bool(is) => if *is { "yes" } else { "no" }.to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(format_value).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| format!("{name} {}", format_value(value));
            fields.iter().map(field).collect::<Vec<_>>().join(", ")
        }
    }
}
