"""What each verb does from beginning to end."""
