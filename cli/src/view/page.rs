//! Pages: one HTML file with its style, script and data, which loads nothing else.

use std::io::{self, Write};

use sha2::{Digest, Sha256};

use super::blob::{Blob, base64};

/// The parts of a page other than its data.
pub struct Page {
    body: &'static str,
    scripts: &'static [&'static str],
}

const STYLE: &str = include_str!("style.css");
const COMMON: &str = include_str!("common.js");

/// The page of memory over time.
pub const MEMORY: Page = Page {
    body: include_str!("memory.html"),
    scripts: &[COMMON, include_str!("memory.js"), include_str!("timeline.js")],
};

/// The page of a profile's timeline.
pub const PROFILE: Page = Page {
    body: include_str!("profile.html"),
    scripts: &[COMMON, include_str!("table.js"), include_str!("profile.js")],
};

impl Page {
    /// Writes the page. The browser runs only this script and opens no connection, whatever the data contains.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn write(&self, blob: Blob, out: &mut impl Write) -> io::Result<()> {
        let script = format!("\n\"use strict\";\n{}", self.scripts.concat());
        let hash = base64(&Sha256::digest(&script));
        write!(
            out,
            "<!DOCTYPE html>
<html lang=\"en\">
<head>
<meta charset=\"utf-8\">
<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data:\">
<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">
<meta name=\"color-scheme\" content=\"light dark\">
<link rel=\"icon\" href=\"data:,\">
<title>claystone</title>
<style>
{STYLE}</style>
</head>
<body>
{}<script type=\"text/plain\" id=\"data\">",
            self.body
        )?;
        blob.write(out)?;
        write!(out, "</script>\n<script>{script}</script>\n</body>\n</html>\n")
    }
}
