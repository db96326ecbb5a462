package pystack

// lineOf is the line of the instruction at byte offset addr of a code that begins at line first; 0: it has none, as
// code that the compiler has made up. It ends with any table.
func lineOf(format lineFormat, table []byte, first, addr int) int {
	if addr < 0 { // not begun
		return first
	}
	line := 0
	switch format {
	case lnotab:
		line = lineOfLnotab(table, first, addr)
	case lineDelta:
		line = lineOfDelta(table, first, addr)
	case locations:
		line = lineOfLocations(table, first, addr)
	}
	return max(line, 0)
}

// lineOfLnotab reads co_lnotab: pairs of how many bytes further, and how many lines (signed).
func lineOfLnotab(table []byte, line, addr int) int {
	at := 0
	for ; len(table) >= 2; table = table[2:] {
		if at += int(table[0]); at > addr {
			break
		}
		line += int(int8(table[1]))
	}
	return line
}

// lineOfDelta reads the co_linetable of 3.10: pairs of how many bytes a range has, and by how many lines (signed) it is
// further than the last; -128 is no line.
func lineOfDelta(table []byte, line, addr int) int {
	const noLine = -128
	end := 0
	for ; len(table) >= 2; table = table[2:] {
		end += int(table[0])
		delta := int(int8(table[1]))
		if delta != noLine {
			line += delta
		}
		if addr < end {
			if delta == noLine {
				return 0
			}
			return line
		}
	}
	return 0
}

// lineOfLocations reads the co_linetable of 3.11 and later. Each entry begins with a byte that has the upper bit set;
// no other byte has it. Four bits are its kind, three its length in code units, less one.
func lineOfLocations(table []byte, line, addr int) int {
	const (
		noColumns = 13
		long      = 14
		noLine    = 15
		unit      = 2 // bytes
	)
	end := 0
	for len(table) > 0 {
		kind := table[0] >> 3 & 15
		end += (int(table[0]&7) + 1) * unit
		table = table[1:]
		switch kind {
		case noColumns, long:
			line += signedVarint(table)
		case 10, 11, 12:
			line += int(kind) - 10
		}
		if addr < end {
			if kind == noLine {
				return 0
			}
			return line
		}
		for len(table) > 0 && table[0]&0x80 == 0 {
			table = table[1:]
		}
	}
	return 0
}

// signedVarint reads six bits a byte, the lowest first; bit 6 means that more follow. The lowest bit is the sign.
func signedVarint(b []byte) int {
	v, shift := 0, 0
	for _, c := range b {
		v |= int(c&63) << shift
		shift += 6
		if c&64 == 0 || shift > 42 {
			break
		}
	}
	if v&1 != 0 {
		return -(v >> 1)
	}
	return v >> 1
}
