//! Chat templates: Jinja programs in GGUF files that write a conversation as a prompt.

use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value, context};

/// The template of files without one, if their vocabulary has its tokens.
pub const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A message of a conversation.
#[derive(Clone, Debug)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    pub content: String,
}

/// Writes a conversation as a prompt for the next message of the assistant. `bounds` are the texts of the tokens that begin and end
/// a sequence. Templates see the variables and functions that Hugging Face's `apply_chat_template` gives them.
pub fn render(template: &str, messages: &[Message], bounds: &[String; 2]) -> Result<String, Error> {
    let mut jinja = Environment::new();
    jinja.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    jinja.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    let fail = |reason: String| -> Result<Value, Error> { Err(Error::new(ErrorKind::InvalidOperation, reason)) };
    jinja.add_function("raise_exception", fail);
    jinja.add_function("strftime_now", |format: &str| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        date(format, now.as_secs() / 86_400)
    });
    let messages = messages.iter().map(|m| context! { role => m.role, content => m.content.as_str() });
    jinja.template_from_str(template)?.render(context! {
        messages => messages.collect::<Vec<Value>>(),
        add_generation_prompt => true,
        bos_token => bounds[0].as_str(),
        eos_token => bounds[1].as_str(),
    })
}

/// Formats a date, given as days since 1970, with the codes `%d`, `%m`, `%b`, `%B` and `%Y` of `strftime`.
pub fn date(format: &str, days: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    // Years begin in March, so that the leap day is the last day of a year. An era has 400 years.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let from_march = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * from_march + 2) / 5 + 1, (from_march + 2) % 12);
    let year = 400 * era + year + u64::from(month < 2);
    let name = MONTHS[month as usize];
    [
        ("%d", format!("{day:02}")),
        ("%m", format!("{:02}", month + 1)),
        ("%B", name.to_owned()),
        ("%b", name[..3].to_owned()),
        ("%Y", year.to_string()),
    ]
    .into_iter()
    .fold(format.to_owned(), |text, (code, value)| text.replace(code, &value))
}
