package policy

// ReadYAML reads a document without understanding it: its fields, and the elements of rules.
func ReadYAML(text string) (fields map[string]string, items []any, err error) {
	doc, err := parseYAML(text)
	if err != nil {
		return nil, nil, err
	}
	fields = values(doc.fields)
	for _, it := range doc.rules {
		if it.text != "" {
			items = append(items, it.text)
		} else {
			items = append(items, values(it.fields))
		}
	}
	return fields, items, nil
}

func values(fields []field) map[string]string {
	m := map[string]string{}
	for _, f := range fields {
		m[f.key] = f.value
	}
	return m
}
