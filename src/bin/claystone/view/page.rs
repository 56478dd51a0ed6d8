//! Pages: one HTML file with its style, its script and its data, which loads nothing else.

use std::io::{self, Write};

use sha2::{Digest, Sha256};

use super::blob::{Blob, base64};

/// What a page is made of beside its data.
pub struct Page {
    body: &'static str,
    scripts: &'static [&'static str],
}

const STYLE: &str = include_str!("style.css");
const COMMON: &str = include_str!("common.js");

/// Memory over time.
pub const MEMORY: Page = Page {
    body: include_str!("memory.html"),
    scripts: &[COMMON, include_str!("memory.js"), include_str!("timeline.js")],
};

/// What ran when.
pub const PROFILE: Page = Page {
    body: include_str!("profile.html"),
    scripts: &[COMMON, include_str!("table.js"), include_str!("profile.js")],
};

impl Page {
    /// Writes the page. The browser runs this script and no other, and opens no connection, whatever the data says.
    ///
    /// # Errors
    /// When `out` fails.
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
