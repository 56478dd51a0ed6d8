// Parses programs by recursive descent.
#include "functions.h"
#include "program.h"

#include <c10/util/Exception.h>

#include <cctype>
#include <unordered_map>

namespace claystone_torch {
namespace {

std::vector<Parameter> read_parameters(const std::string& line, size_t at) {
    std::vector<Parameter> result;
    // `name(input, weight?, *tensors, dim: int = 0, padding: padding = 0)`: only defaults in brackets contain a comma.
    std::string one;
    int depth = 0;
    for (size_t i = at + 1; i < line.size(); i++) {
        const char c = line[i];
        if ((c == ',' || c == ')') && depth == 0) {
            const size_t start = one.find_first_not_of(' ');
            if (start != std::string::npos) {
                one = one.substr(start);
                const bool is_list = one[0] == '*';
                const bool is_tensor = one.find(':') == std::string::npos;
                result.push_back({one.substr(is_list, one.find_first_of("?:= ", is_list) - is_list), is_tensor, is_list});
            }
            one.clear();
            if (c == ')') {
                break;
            }
        } else {
            depth += (c == '[' || c == '(') - (c == ']' || c == ')');
            one += c;
        }
    }
    return result;
}

std::unordered_map<std::string, std::vector<Parameter>> read_operations() {
    std::unordered_map<std::string, std::vector<Parameter>> all;
    ClaystoneBytes text;
    check(claystone_operations(&text));
    const std::string lines = take(text);
    for (size_t start = 0; start < lines.size();) {
        const size_t end = std::min(lines.find('\n', start), lines.size());
        const std::string line = lines.substr(start, end - start);
        if (const size_t at = line.find('('); at != std::string::npos) {
            all[line.substr(0, at)] = read_parameters(line, at);
        }
        start = end + 1;
    }
    return all;
}

class Parser {
public:
    Parser(const std::string& source, std::vector<std::string> names) : source(source), names(std::move(names)) {}

    Program program() {
        Program result;
        while (true) {
            const size_t start = at;
            const std::string name = word();
            if (!name.empty() && take_sign("=") ) {
                auto value = choice();
                expect(";");
                names.push_back(name);
                result.assignments.emplace_back(names.size() - 1, std::move(value));
                continue;
            }
            at = start;
            break;
        }
        do {
            result.results.push_back(choice());
        } while (take_sign(","));
        space();
        TORCH_CHECK(at == source.size(), "operators.toml: \"", source, "\": unexpected \"", source.substr(at), "\"");
        result.slots = names.size();
        return result;
    }

private:
    using Pointer = std::unique_ptr<Node>;

    static Pointer node(Node::Kind kind, std::string text = "") {
        auto result = std::make_unique<Node>();
        result->kind = kind;
        result->text = std::move(text);
        return result;
    }

    template <typename... Children>
    static Pointer node(Node::Kind kind, std::string text, Children... children) {
        auto result = node(kind, std::move(text));
        (result->children.push_back(std::move(children)), ...);
        return result;
    }

    static Pointer constant(Value value) {
        auto result = node(Node::Constant);
        result->constant = std::move(value);
        return result;
    }

    void space() {
        while (at < source.size() && std::isspace(static_cast<unsigned char>(source[at]))) {
            at++;
        }
    }

    std::string word() {
        space();
        const size_t start = at;
        while (at < source.size() && (std::isalnum(static_cast<unsigned char>(source[at])) || source[at] == '_')) {
            at++;
        }
        return source.substr(start, at - start);
    }

    bool take_sign(const std::string& sign) {
        space();
        if (source.compare(at, sign.size(), sign) != 0 || (sign == "=" && source.compare(at, 2, "==") == 0)) {
            return false;
        }
        at += sign.size();
        return true;
    }

    bool take_word(const std::string& wanted) {
        const size_t start = at;
        if (word() == wanted) {
            return true;
        }
        at = start;
        return false;
    }

    void expect(const std::string& sign) {
        TORCH_CHECK(take_sign(sign), "operators.toml: \"", source, "\": expected \"", sign, "\" before \"", source.substr(at), "\"");
    }

    Pointer choice() {
        auto condition = disjunction();
        if (!take_sign("?")) {
            return condition;
        }
        auto then = choice();
        expect(":");
        return node(Node::Choice, "", std::move(condition), std::move(then), choice());
    }

    Pointer disjunction() {
        auto left = conjunction();
        while (take_word("or")) {
            left = node(Node::Infix, "or", std::move(left), conjunction());
        }
        return left;
    }

    Pointer conjunction() {
        auto left = negation();
        while (take_word("and")) {
            left = node(Node::Infix, "and", std::move(left), negation());
        }
        return left;
    }

    Pointer negation() {
        return take_word("not") ? node(Node::Not, "", negation()) : comparison();
    }

    Pointer comparison() {
        auto left = sum();
        for (const char* sign : {"==", "!=", "<", ">"}) {
            if (take_sign(sign)) {
                return node(Node::Infix, sign, std::move(left), sum());
            }
        }
        return left;
    }

    Pointer sum() {
        auto left = product();
        while (true) {
            if (take_sign("+")) {
                left = node(Node::Infix, "+", std::move(left), product());
            } else if (take_sign("-")) {
                left = node(Node::Infix, "-", std::move(left), product());
            } else {
                return left;
            }
        }
    }

    Pointer product() {
        auto left = indexed();
        while (true) {
            if (take_sign("*")) {
                left = node(Node::Infix, "*", std::move(left), indexed());
            } else if (take_sign("/")) {
                left = node(Node::Infix, "/", std::move(left), indexed());
            } else {
                return left;
            }
        }
    }

    Pointer indexed() {
        auto value = atom();
        while (take_sign("[")) {
            value = node(Node::Index, "", std::move(value), choice());
            expect("]");
        }
        return value;
    }

    Pointer atom() {
        space();
        const char c = at < source.size() ? source[at] : '\0';
        if (take_sign("(")) {
            auto value = choice();
            expect(")");
            return value;
        }
        if (take_sign("[")) {
            auto list = node(Node::List);
            while (!take_sign("]")) {
                list->children.push_back(choice());
                take_sign(",");
            }
            return list;
        }
        if (take_sign("'")) {
            const size_t end = source.find('\'', at);
            TORCH_CHECK(end != std::string::npos, "operators.toml: \"", source, "\": a text has no end");
            return constant(source.substr(std::exchange(at, end + 1), end - at));
        }
        if (std::isdigit(static_cast<unsigned char>(c)) || c == '-') {
            return number();
        }
        const std::string name = word();
        TORCH_CHECK(!name.empty(), "operators.toml: \"", source, "\": expected a value before \"", source.substr(at), "\"");
        if (name == "none" || name == "true" || name == "false") {
            return constant(name == "none" ? Value() : Value(name == "true"));
        }
        return take_sign("(") ? call(name) : variable(name);
    }

    Pointer number() {
        const size_t start = at;
        at += source[at] == '-';
        while (at < source.size() && (std::isdigit(static_cast<unsigned char>(source[at])) || source[at] == '.' || source[at] == 'e' ||
                                      (source[at] == '-' && source[at - 1] == 'e'))) {
            at++;
        }
        const std::string digits = source.substr(start, at - start);
        return digits.find_first_of(".e") == std::string::npos ? constant(int64_t(std::stoll(digits))) : constant(std::stod(digits));
    }

    Pointer variable(const std::string& name) {
        for (size_t i = names.size(); i-- > 0;) {
            if (names[i] == name) {
                auto result = node(Node::Variable, name);
                result->slot = i;
                return result;
            }
        }
        TORCH_CHECK(false, "operators.toml: \"", source, "\": the operator has no argument ", name);
    }

    Pointer call(const std::string& name) {
        const auto* known = parameters(name);
        auto result = node(
            known                  ? Node::Operation
            : name == "gradient"   ? Node::Gradient
            : name == "device"     ? Node::Device
            : name == "out_dtype"  ? Node::OutDtype
                                   : Node::Call,
            name);
        result->parameters = known;
        if (known) {
            result->children.resize(known->size());
            result->with_scalar = name + "_scalar";
            result->scalar_parameters = parameters(result->with_scalar);
        } else if (result->kind == Node::Call) {
            result->function = find_function(name);
        }
        for (size_t position = 0; !take_sign(")"); position++) {
            const size_t start = at;
            const std::string key = word();
            if (known && !key.empty() && take_sign("=")) {
                position = 0;
                while (position < known->size() && (*known)[position].name != key) {
                    position++;
                }
                TORCH_CHECK(position < known->size(), "operators.toml: \"", source, "\": ", name, " has no parameter ", key);
            } else {
                at = start;
            }
            auto value = choice();
            if (known) {
                TORCH_CHECK(position < known->size(), "operators.toml: \"", source, "\": ", name, " has only ", known->size(), " parameters");
                result->children[position] = std::move(value);
            } else {
                result->children.push_back(std::move(value));
            }
            take_sign(",");
        }
        return result;
    }

    const std::string& source;
    std::vector<std::string> names;
    size_t at = 0;
};

} // namespace

const std::vector<Parameter>* parameters(const std::string& operation) {
    static const auto all = read_operations();
    const auto found = all.find(operation);
    return found == all.end() ? nullptr : &found->second;
}

Program parse(const std::string& source, const std::vector<std::string>& arguments) {
    return Parser(source, arguments).program();
}

} // namespace claystone_torch
